"""Weights in memory from several ranks to the workers of several engines; ranks and engines are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy import sent_weights, weight_sender
from nemo_rl_dsv4.policy.sent_weights import SentWeights
from nemo_rl_dsv4.policy.weight_sender import WeightSender
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.delivery import Seat
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastReceiver
from nemo_rl_dsv4.refit.transport.channel import open_channel
from nemo_rl_dsv4.refit.transport.protocol import receive_staged
from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver, SharedSender

State = dict[str, torch.Tensor]
HOST = "node-1"


class Remote:
    """An actor whose calls run on one thread of its own, as Ray's do."""

    def __init__(self, target: Any) -> None:
        self._target, self._thread = target, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return SimpleNamespace(remote=lambda *args: self._thread.submit(call, method, args))


def call(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return method(*args)
    except UserError as error:
        raise RayTaskError("call", str(error), error) from error


def get(refs: list[Future]) -> list[Any]:
    try:
        return [ref.result(60) for ref in refs]
    except RayTaskError as error:
        raise UserError(str(error.cause)) from error


def wait_for(refs: list[Future], num_returns: int) -> tuple[list[Future], list[Future]]:
    assert num_returns == 1
    done = next(iter(wait(refs, 60, FIRST_COMPLETED).done))
    return [done], [ref for ref in refs if ref is not done]


class Rank:
    """A rank of a replicated policy on its own GPU."""

    def __init__(self, number: int, state: State) -> None:
        self.number, self.state = number, state
        self.sender = WeightSender(torch.device("cpu"), "127.0.0.1")
        self.open_sender = self.sender.open

    def seat(self) -> Seat:
        return Seat(HOST, f"gpu{self.number}")

    def send_weights(self, profile: str, version: int) -> Any:
        mine = self.sender.receivers > 0
        return self.sender.send(lambda: export_weights(self.state, profile) if mine else None, version)


class Engine:
    """An engine of several workers, each of which stages a refit."""

    def __init__(self, gpus: list[str], expected: dict[str, tuple[int, ...]]) -> None:
        self.gpus, self.expected = gpus, expected
        self.checksum = ""

    def seats(self) -> list[Seat]:
        return [Seat(HOST, gpu) for gpu in self.gpus]

    def receive_weights(self, transport: str, addresses: dict[str, Any], version: int) -> dict[str, Any]:
        def worker(gpu: str) -> str:
            if transport == "broadcast":
                host, port, rank, size = addresses[gpu]
                channel = open_channel((host, port), rank=rank, size=size, device="cpu", timeout=20)
                return receive_staged(BroadcastReceiver(channel, version=version), self.expected).checksum
            own = addresses[gpu] if transport == "cuda_ipc" else next(iter(addresses.values()))
            return receive_staged(SharedReceiver(Address(*own), timeout=20), self.expected).checksum

        with ThreadPoolExecutor(len(self.gpus)) as pool:
            (self.checksum,) = set(pool.map(worker, self.gpus))
        return {"checksum": self.checksum, "transport": transport}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads in place of Ray, host memory in place of a GPU's, and a vote among two ranks."""
    votes, barrier, lock = [], threading.Barrier(2), threading.Lock()

    def vote(good: bool) -> bool:
        with lock:
            votes.append(good)
        barrier.wait(30)
        return all(votes[-2:])

    def sender(device: Any, **options: Any) -> SharedSender:
        return SharedSender(**options, timeout=20)

    monkeypatch.setattr(sent_weights, "get", get)
    monkeypatch.setattr(sent_weights.ray, "wait", wait_for)
    monkeypatch.setattr(sent_weights.ray, "get", lambda ref: ref.result(60))
    monkeypatch.setattr(weight_sender, "_all_ranks", vote)
    monkeypatch.setattr(weight_sender, "SharedSender", sender)
    monkeypatch.setattr(WeightSender, "gpu", property(lambda self: self.name))
    yield


@pytest.fixture
def policy(threads: None, training_once: State) -> Any:
    ranks = [Rank(number, dict(training_once)) for number in range(2)]
    for rank in ranks:
        rank.sender.name = rank.seat().gpu  # type: ignore[attr-defined]
    spec = SimpleNamespace(profile="vllm-hopper")
    slept: list[str] = []
    made = SimpleNamespace(actors=[Remote(rank) for rank in ranks], ranks=ranks, spec=spec, version=3, updates=5)
    made.submitting = contextlib.nullcontext()
    made.slept, made.sleep = slept, lambda optimizer_only=False: slept.append("optimizer" if optimizer_only else "all")
    return made


def engines(official_once: State, *gpus: list[str]) -> list[Remote]:
    expected = {name: tuple(value.shape) for name, value in official_once.items()}
    return [Remote(Engine(names, expected)) for names in gpus]


@pytest.mark.parametrize(
    ("gpus", "transport"),
    [
        ([["gpu0"], ["gpu1"]], "cuda_ipc"),
        ([["gpu1"]], "cuda_ipc"),
        ([["gpu0", "gpu1"]], "cuda_ipc"),
        ([["gpu0", "gpu7"]], "shared_memory"),
    ],
)
def test_every_worker_stages_the_same_weights_twice(
    policy: Any, official_once: State, gpus: list[list[str]], transport: str
) -> None:
    """A worker on a rank's GPU takes them there; where one has no rank, all take them from the host's memory."""
    made = engines(official_once, *gpus)
    for _ in range(2):
        reports = SentWeights(policy, "auto", 400_000).deliver(made)
        assert len(reports) == len(gpus)
        assert len({report["checksum"] for report in reports}) == 1
        assert {report["transport"] for report in reports} == {transport}
    assert policy.slept == ["optimizer", "all"] * 2  # the second time an engine got them again, with ranks awake for it


@pytest.mark.parametrize("gpus", [[["gpu0", "gpu1"]], [["gpu5"], ["gpu7"]], [["gpu0"]]])
def test_every_worker_stages_the_same_weights_twice_by_broadcast(
    policy: Any, official_once: State, gpus: list[list[str]]
) -> None:
    """From one rank to all, or from each rank to the worker on the other's GPU where every GPU has both."""
    made = engines(official_once, *gpus)
    for _ in range(2):
        reports = SentWeights(policy, "broadcast", 400_000).deliver(made)
        assert len({report["checksum"] for report in reports}) == 1
        assert {report["transport"] for report in reports} == {"broadcast"}


@pytest.mark.parametrize("transport", ["cuda_ipc", "broadcast"])
def test_a_rank_that_cannot_export_leaves_every_engine_as_it_was(
    policy: Any, official_once: State, transport: Any
) -> None:
    """Its own error is raised, not those of the engines that it left without weights."""
    made = engines(official_once, ["gpu0"], ["gpu1"])
    policy.ranks[1].state["model.norm.weight"] = torch.full_like(policy.ranks[1].state["model.norm.weight"], torch.nan)
    with pytest.raises(UserError, match=r"norm.weight\[0\] is nan"):
        SentWeights(policy, transport, 400_000).deliver(made)
    assert [engine._target.checksum for engine in made] == ["", ""]


def test_weights_that_the_policy_no_longer_has_are_not_sent(policy: Any, official_once: State) -> None:
    """An engine that died later must not get others than the rest of them hold."""
    sent = SentWeights(policy, "auto", 400_000)
    policy.updates += 1
    with pytest.raises(UserError, match="weights of version 3 again, but the policy has been trained since"):
        sent.deliver(engines(official_once, ["gpu0"]))
    assert policy.slept == []


def test_weights_that_are_trained_while_the_ranks_are_asked_are_not_sent(policy: Any, official_once: State) -> None:
    """A rank that scores answers seconds later; an update may have been called by then, and comes first."""
    sent, first = [], policy.ranks[0]
    open_sender, first.send_weights = first.open_sender, lambda *args: sent.append(args)

    def opened(*args: Any) -> Any:
        policy.updates += 1
        return open_sender(*args)

    first.open_sender = opened
    with pytest.raises(UserError, match="the weights of version 3 again, but the policy has been trained since"):
        SentWeights(policy, "cuda_ipc", 1 << 20).deliver(engines(official_once, ["gpu0"]))
    assert sent == []


def test_a_process_that_died_is_what_a_refit_failed_of(threads: None) -> None:
    """The ranks that waited for it only heard of it; a group of engines starts a dead one again."""
    told = [failed(RayTaskError("call", "", UserError(text))) for text in ("not committed", "the other end is gone")]
    with pytest.raises(RayActorError, match="an engine"):
        sent_weights._both(told, [failed(RayActorError(error_msg="an engine"))])
    with pytest.raises(UserError, match="the other end is gone"):
        sent_weights._both(told, [])


def failed(error: Exception) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future
