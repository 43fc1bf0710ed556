"""Broadcast over gloo, ends as threads of this process; and several senders that commit together or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.staging import StagedWeights
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastReceiver, BroadcastSender
from nemo_rl_dsv4.refit.transport.channel import Channel, listen, open_channel
from nemo_rl_dsv4.refit.transport.protocol import receive_staged
from nemo_rl_dsv4.refit.transport.shared import SharedReceiver, SharedSender, _on_device, gpu_name

Items = list[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[int, ...]]
CAPACITY = 400_000


@pytest.fixture(scope="module")
def stream(training_once: dict[str, torch.Tensor]) -> Items:
    return list(export_weights(training_once, "vllm-hopper"))


@pytest.fixture(scope="module")
def expected(official_once: dict[str, torch.Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in official_once.items()}


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Call all of them at once; what each returned, or the exception it raised."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def channels(size: int, timeout: float = 10) -> list[Channel]:
    store = listen(timeout=timeout)
    made = together(
        *(
            lambda rank=rank: open_channel(
                store if rank == 0 else ("127.0.0.1", store.port), rank=rank, size=size, device="cpu", timeout=timeout
            )
            for rank in range(size)
        )
    )
    assert all(isinstance(end, Channel) for end in made), made
    return made


@pytest.fixture(scope="module")
def three() -> list[Channel]:
    """A sender and two engines."""
    return channels(3)


def stage(channel: Channel, version: int, expected: Shapes) -> StagedWeights:
    return receive_staged(BroadcastReceiver(channel, version=version), expected)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_broadcast_serves_two_engines_twice_and_refuses_together(
    three: list[Channel], stream: Items, expected: Shapes
) -> None:
    assert not dist.is_initialized()  # the channel is no default group: an engine has its own
    sender = BroadcastSender(three[0], capacity_bytes=CAPACITY)

    def refit(version: int, weights: Any, *shapes: Shapes) -> list[Any]:
        ends = [
            lambda end=end, want=want: stage(end, version, want) for end, want in zip(three[1:], shapes, strict=True)
        ]
        return together(lambda: sender.send(weights, version=version), *ends)

    for version in (1, 2):
        report, *engines = refit(version, iter(stream), expected, expected)
        for staged in engines:
            assert (staged.version, staged.checksum) == (version, report.checksum)
            found = dict(staged.stream())
            assert found.keys() == dict(stream).keys()
            assert all(torch.equal(raw(found[name]), raw(tensor)) for name, tensor in stream)

    sent, good, bad = refit(3, iter(stream), expected, {**expected, "norm.weight": (64,)})
    assert "engine 2 could not stage it: refit: 'norm.weight' is [128]" in str(sent)
    assert "not committed, the sender gave up" in str(good)
    assert "norm.weight" in str(bad)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream[:200]
        raise UserError("layers.3 is nan")

    sent, *engines = refit(4, broken(), expected, expected)
    assert str(sent) == "layers.3 is nan"
    assert all("the sender gave up: layers.3 is nan" in str(engine) for engine in engines)

    report, *engines = refit(5, iter(stream), expected, expected)
    assert [engine.version for engine in engines] == [5, 5]
    sent = together(lambda: sender.send(iter(stream), version=5))[0]
    assert "version 5 was sent before" in str(sent)


def test_an_engine_that_refuses_early_stops_the_sender_early(
    three: list[Channel], stream: Items, expected: Shapes
) -> None:
    """The rest of the stream is consumed all the same: other training ranks take part in making it."""
    taken: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            taken.append(name)
            yield name, tensor

    def refuse() -> None:
        receiver = BroadcastReceiver(three[1], version=21)
        next(receiver.buckets())
        receiver.fail("no memory")
        received.append(receiver._next)

    received: list[int] = []
    sender = BroadcastSender(three[0], capacity_bytes=CAPACITY)
    sent, _, other = together(lambda: sender.send(watched(), version=21), refuse, lambda: stage(three[2], 21, expected))
    assert "engine 1 could not stage it: no memory" in str(sent)
    assert "the sender gave up" in str(other)
    assert taken == [name for name, _ in stream]
    assert received[0] <= 4  # of 10 buckets or more
    assert sum(tensor.numel() * tensor.element_size() for _, tensor in stream) > 10 * CAPACITY


def test_silence_ends_in_a_timeout_and_an_engine_can_join_again(stream: Items, expected: Shapes) -> None:
    first = channels(2, timeout=3)  # a busy machine may take that long to join
    for end in first:
        end.timeout = 0.4
    sender = BroadcastSender(first[0], capacity_bytes=CAPACITY)
    (engine,) = together(lambda: stage(first[1], 1, expected))
    assert "nothing from the sender for 0.4 s" in str(engine)
    sent = together(lambda: sender.send(iter(stream), version=1))[0]
    assert "engine 1 could not stage it: refit: nothing from the sender for 0.4 s" in str(sent)
    with pytest.raises(UserError, match=r"a broadcast failed or took over 0\.4 s"):
        sender.send(iter(stream), version=2)  # nobody receives
    with pytest.raises(UserError, match=r"this channel broke earlier \(.*\); open a new one"):
        sender.send(iter(stream), version=3)
    again = channels(2)
    sender = BroadcastSender(again[0], capacity_bytes=CAPACITY)
    _, engine = together(lambda: sender.send(iter(stream), version=3), lambda: stage(again[1], 3, expected))
    assert engine.version == 3


class Group:
    """A group whose first collective takes a while, as gloo's does to queue and NCCL's does to meet the other ends."""

    def __init__(self, inside: list[Any], most: list[int], meet: threading.Barrier | None) -> None:
        self.inside, self.most, self.meet = inside, most, meet

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.inside.append(self)
        self.most.append(len(self.inside))
        if self.meet is None:
            time.sleep(0.05)
        else:
            self.meet.wait()
        self.inside.remove(self)
        return SimpleNamespace(wait=lambda timeout: True)


@pytest.mark.parametrize(("device", "together_inside"), [("cpu", 1), ("cuda", 3)])
def test_ends_of_one_process_start_gloo_broadcasts_one_at_a_time(device: str, together_inside: int) -> None:
    """torch's flight recorder is no place for two threads at once; NCCL's ends meet inside and must not wait there."""
    inside: list[Any] = []
    most: list[int] = []
    meet = threading.Barrier(3, timeout=10) if device == "cuda" else None
    ends = [
        Channel(dist.HashStore(), Group(inside, most, meet), rank, 3, torch.device(device), 10) for rank in range(3)
    ]
    works = together(*(partial(end.broadcast, torch.zeros(1)) for end in ends))
    assert [end.wait(work) for end, work in zip(ends, works, strict=True)] == [None, None, None]
    assert max(most) == together_inside


def test_an_end_that_does_not_come_is_named() -> None:
    store = listen(timeout=0.3)
    with pytest.raises(UserError, match=r"end 0 of 2 could not join the broadcast within 0\.3 s"):
        open_channel(store, rank=0, size=2, device="cpu", timeout=0.3)


class Ballot:
    """A vote over threads."""

    def __init__(self, senders: int) -> None:
        self._barrier, self._votes = threading.Barrier(senders, timeout=10), []

    def __call__(self, good: bool) -> bool:
        self._votes.append(good)
        self._barrier.wait()
        return all(self._votes)


@pytest.mark.parametrize("transport", ["shared", "broadcast"])
def test_engines_of_two_senders_commit_together_or_not_at_all(transport: str, stream: Items, expected: Shapes) -> None:
    """A tensor-parallel engine whose workers have a sender each: half of it must never get new weights alone."""
    senders: list[Any] = []
    if transport == "shared":
        senders = [SharedSender(capacity_bytes=CAPACITY, timeout=10) for _ in range(2)]
        receivers = [lambda version, s=sender: SharedReceiver(s.address, timeout=10) for sender in senders]
    else:
        pairs = [channels(2), channels(2)]
        senders = [BroadcastSender(pair[0], capacity_bytes=CAPACITY) for pair in pairs]
        receivers = [lambda version, p=pair: BroadcastReceiver(p[1], version=version) for pair in pairs]
    other = {**expected, "norm.weight": (64,)}
    for version, shapes in ((1, (expected, expected)), (2, (expected, other)), (3, (expected, expected))):
        ballot = Ballot(2)
        calls: list[Any] = [partial(s.send, iter(stream), version=version, vote=ballot) for s in senders]
        calls += [
            partial(lambda version, make, want: receive_staged(make(version), want), version, make, want)
            for make, want in zip(receivers, shapes, strict=True)
        ]
        results = together(*calls)
        if shapes[1] is expected:
            assert [staged.version for staged in results[2:]] == [version, version]
        else:
            assert "of another sender could not stage it" in str(results[0])
            assert "norm.weight" in str(results[1])
            assert "of another sender could not stage it" in str(results[2])
            assert "norm.weight" in str(results[3])
    if transport == "shared":
        for sender in senders:
            sender.close()


def test_a_gpu_may_have_another_number_in_each_process() -> None:
    """Training actors see one GPU each, all of them number 0; an engine's workers see every GPU of the engine."""

    def rebuild(kind: str, storage_device: int, handle: bytes) -> Any:
        return SimpleNamespace(device=storage_device)

    assert rebuild(*_on_device(rebuild, ("kind", 0, b""), 1)).device == 1  # type: ignore[arg-type]
    assert rebuild(*_on_device(rebuild, ("kind", 3, b""), None)).device == 3  # type: ignore[arg-type]
    assert gpu_name(torch.device("cpu")) == "cpu"
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert "storage_device" in inspect.signature(rebuild_cuda_tensor).parameters
