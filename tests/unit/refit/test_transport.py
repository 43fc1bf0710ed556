"""Transports: every byte arrives, at most two buckets wait, and a refit that breaks anywhere is committed nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics import pack_ue8m0, scale_to_e8m0_bytes
from nemo_rl_dsv4.refit import StreamTally, export_weights
from nemo_rl_dsv4.refit.buckets import pack_buckets
from nemo_rl_dsv4.refit.checksum import bytes_checksum, item_checksum
from nemo_rl_dsv4.refit.manifest import Manifest, read_bucket, write_bucket
from nemo_rl_dsv4.refit.staging import StagedWeights
from nemo_rl_dsv4.refit.transport.file import read_folder, write_folder
from nemo_rl_dsv4.refit.transport.protocol import receive_staged
from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver, SharedSender

Items = list[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[int, ...]]
CAPACITY = 400_000


@pytest.fixture(scope="module")
def stream(training_once: dict[str, torch.Tensor]) -> Items:
    return list(export_weights(training_once, "vllm-hopper"))


@pytest.fixture(scope="module")
def expected(official_once: dict[str, torch.Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in official_once.items()}


def assert_same(staged: StagedWeights, stream: Items) -> None:
    found = dict(staged.stream())
    assert found.keys() == dict(stream).keys()
    for name, tensor in stream:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(raw(found[name]), raw(tensor)), name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Worker(threading.Thread):
    """Runs a function beside the test and keeps what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def outcome(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


# --- checksum and manifest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1023, 70_001])
def test_checksum_depends_on_every_byte(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    reference = bytes_checksum(data)
    words = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8)
    words[:size] = data
    exact = sum(word * (2 * i + 1) for i, word in enumerate(words.view(torch.int32).tolist()))
    assert reference == exact % 2**64
    assert bytes_checksum(torch.cat([data.new_zeros(1), data])[1:]) == reference
    for index in range(0, size, max(1, size // 50)):
        changed = data.clone()
        changed[index] ^= 0x40
        assert bytes_checksum(changed) != reference
    assert item_checksum("a", data) != item_checksum("b", data)


def test_checksum_sees_exchanged_tensors_and_rows() -> None:
    rows = torch.arange(600, dtype=torch.int32).view(6, 100)
    assert bytes_checksum(rows) != bytes_checksum(rows.flip(0))
    large = torch.arange((1 << 22) + 10, dtype=torch.int32)  # over one chunk
    moved = large.clone()
    moved[5], moved[-1] = large[-1], large[5]
    assert bytes_checksum(moved) != bytes_checksum(large)


def test_manifest_describes_its_bucket(stream: Items) -> None:
    buffer = torch.empty(CAPACITY, dtype=torch.uint8)
    manifest = write_bucket(stream[:6], buffer, version=7, index=2, last=True)
    assert Manifest.from_json(manifest.to_json()) == manifest == Manifest.from_fields(manifest.to_fields())
    assert (manifest.version, manifest.index, manifest.last) == (7, 2, True)
    for (name, sent), (other, got) in zip(stream[:6], read_bucket(manifest, buffer), strict=True):
        assert name == other
        assert torch.equal(raw(sent), raw(got))
    buffer[manifest.entries[3].offset + 1] ^= 1
    with pytest.raises(UserError, match=rf"{manifest.entries[3].name}' of bucket 2 arrived with checksum"):
        list(read_bucket(manifest, buffer))
    with pytest.raises(UserError, match="not a bucket manifest"):
        Manifest.from_json('{"version": 1}')
    for damaged in ({**manifest.to_fields(), "entries": [("a", "float32")]}, {**manifest.to_fields(), "more": 1}):
        with pytest.raises(UserError, match="not a bucket manifest"):
            Manifest.from_fields(damaged)
    with pytest.raises(UserError, match="bucket 0 needs"):
        write_bucket(stream[:6], torch.empty(64, dtype=torch.uint8), version=1, index=0, last=True)


def rescaled(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Items], Items]:
    return lambda s: [(n, change(t) if n == "layers.1.attn.wq_b.scale" else t) for n, t in s]


def filled(value: float) -> Callable[[Items], Items]:
    return rescaled(lambda t: torch.full_like(t, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1:], r"embed\.weight' missing"),
        (lambda s: [*s, ("layers.0.extra", torch.ones(1))], "unknown|not an official|extra"),
        (lambda s: [(n, t) for n, t in s if n != "layers.1.attn.wq_b.scale"], r"wq_b\.weight'.* without its scale"),
        (lambda s: [(n, t[:1] if n == "layers.1.attn.wq_b.scale" else t) for n, t in s], "wanted the raw grid"),
        (lambda s: [(n, t[:-1] if n == "norm.weight" else t) for n, t in s], r"norm\.weight' is \[127\]"),
        (lambda s: [*s, s[-1]], "arrived twice"),
        # Up to 128 columns packed words have the shape of the raw grid.
        (rescaled(lambda t: pack_ue8m0(t).contiguous()), r"wq_b\.scale' is torch\.int32; wanted one float32"),
        (rescaled(scale_to_e8m0_bytes), r"wq_b\.scale' is torch\.uint8; wanted one float32"),
        (filled(0.0), r"wq_b\.scale\[0, 0\] is 0\.0; wanted a power of two"),
        (filled(-1.0), r"wq_b\.scale\[0, 0\] is -1\.0"),
        (filled(0.3), r"wq_b\.scale\[0, 0\] is 0\.3"),
        (filled(float("inf")), r"wq_b\.scale\[0, 0\] is inf"),
        (filled(float("nan")), r"wq_b\.scale\[0, 0\] is nan"),
        (rescaled(lambda t: torch.full_like(t, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)), r"\] is nan"),
    ],
)
def test_incomplete_sets_are_refused(
    stream: Items, expected: Shapes, change: Any, message: str, tmp_path: Path
) -> None:
    """Cases C006, C008, C047 and C048: packed, missing or impossible scales must not reach an engine."""
    folder = tmp_path / "buckets"
    write_folder(change(stream), folder, capacity_bytes=CAPACITY, version=1)
    staged = StagedWeights(expected)
    with pytest.raises(UserError, match=message):
        for manifest, buffer in read_folder(folder, timeout=1):
            staged.add(manifest, buffer)
        staged.check_complete()


def test_scales_may_be_typed_bytes(stream: Items, expected: Shapes) -> None:
    """Case C006: float8_e8m0fnu keeps its value when a loader casts it."""
    staged, buffer = StagedWeights(expected), torch.empty(4 * CAPACITY, dtype=torch.uint8)
    as_bytes = rescaled(lambda t: scale_to_e8m0_bytes(t).view(torch.float8_e8m0fnu))(filled(2.0**-7)(stream))
    buckets = list(pack_buckets(as_bytes, CAPACITY))
    for index, items in enumerate(buckets):
        manifest = write_bucket(items, buffer, version=1, index=index, last=index == len(buckets) - 1)
        staged.add(manifest, buffer)
    staged.check_complete()
    assert dict(staged.stream())["layers.1.attn.wq_b.scale"].float().unique().tolist() == [2.0**-7]


# --- file --------------------------------------------------------------------------------------------------------


def test_files_carry_two_refits(stream: Items, expected: Shapes, tmp_path: Path) -> None:
    for version in (1, 2):
        count = write_folder(stream, tmp_path / "buckets", capacity_bytes=CAPACITY, version=version)
        staged = StagedWeights(expected)
        for manifest, buffer in read_folder(tmp_path / "buckets", timeout=1):
            staged.add(manifest, buffer)
        staged.check_complete()
        assert count > 3
        assert staged.version == version
        assert_same(staged, stream)
        tally = StreamTally()
        list(tally.watch(stream))
        assert staged.checksum == tally.report().checksum


def test_files_that_stop_or_are_cut_are_refused(stream: Items, tmp_path: Path) -> None:
    count = write_folder(stream, tmp_path / "buckets", capacity_bytes=CAPACITY, version=1)
    (tmp_path / "buckets" / f"bucket-{count - 1:05d}.json").unlink()
    with pytest.raises(UserError, match=r"no .*json after 0\.05 s"):
        list(read_folder(tmp_path / "buckets", timeout=0.05))
    cut = tmp_path / "buckets" / "bucket-00000.bin"
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.raises(UserError, match="its .bin file has 100"):
        list(read_folder(tmp_path / "buckets", timeout=0.05))
    (tmp_path / "buckets" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'notes\.txt', which is no bucket"):
        write_folder(stream, tmp_path / "buckets", capacity_bytes=CAPACITY, version=2)


# --- shared memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def sender() -> Iterator[SharedSender]:
    made = SharedSender(capacity_bytes=CAPACITY, receivers=2, timeout=5)
    yield made
    made.close()


def shared(address: Address, expected: Shapes) -> StagedWeights:
    return receive_staged(SharedReceiver(address, timeout=5), expected)


def test_shared_memory_serves_two_engines_twice(sender: SharedSender, stream: Items, expected: Shapes) -> None:
    for version in (1, 2):
        engines = [Worker(lambda: shared(sender.address, expected)) for _ in range(2)]
        report = sender.send(iter(stream), version=version)
        for engine in engines:
            staged = engine.outcome()
            assert (staged.version, staged.checksum) == (version, report.checksum)
            assert_same(staged, stream)


def test_another_process_maps_the_same_memory(stream: Items, expected: Shapes) -> None:
    """The engine of a colocated run is another process; nothing is left behind when the sender closes."""
    program = (
        "import json, sys\n"
        "from nemo_rl_dsv4.refit.transport.protocol import receive_staged\n"
        "from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver\n"
        "given = json.loads(sys.argv[1])\n"
        "expected = {name: tuple(shape) for name, shape in given['expected'].items()}\n"
        "staged = receive_staged(SharedReceiver(Address(*given['address']), timeout=60), expected)\n"
        "print(staged.version, staged.checksum)\n"
    )
    sender = SharedSender(capacity_bytes=CAPACITY, timeout=60)
    folder = Path(sender.address.socket).parent
    address = [sender.address.socket, sender.address.key]
    given = json.dumps({"expected": expected, "address": address})
    root = Path(__file__).parents[3]
    engine = subprocess.Popen(
        [sys.executable, "-c", program, given],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        report = sender.send(iter(stream), version=9)
        assert engine.communicate(timeout=60)[0].split() == ["9", report.checksum]
        assert folder.is_dir()
    finally:
        engine.kill()
        sender.close()
    assert not folder.exists()


def test_at_most_two_buckets_are_in_flight(sender: SharedSender, stream: Items, expected: Shapes) -> None:
    """Flow control: a slow engine holds the exporter back instead of filling memory."""
    produced: list[str] = []
    lead: list[int] = []

    def exporting() -> Iterator[tuple[str, torch.Tensor]]:
        for item in stream:
            produced.append(item[0])
            yield item

    def slow() -> StagedWeights:
        receiver = SharedReceiver(sender.address, timeout=5)
        staged = StagedWeights(expected)
        for manifest, buffer in receiver.buckets():
            staged.add(manifest, buffer)
            threading.Event().wait(0.05)
            arrived = produced.index(manifest.entries[-1].name) + 1
            lead.append(sum(t.numel() * t.element_size() for _, t in stream[arrived : len(produced)]))
        receiver.agree(staged.checksum)
        return staged

    engines = [Worker(slow), Worker(lambda: shared(sender.address, expected))]
    sender.send(exporting(), version=1)
    assert all(engine.outcome().version == 1 for engine in engines)
    # Beyond the bucket being read: one packed into the other slot, one held back, and the item that closed it.
    assert max(lead) <= 4 * CAPACITY
    assert max(lead) < sum(t.numel() * t.element_size() for _, t in stream) / 2


def test_no_engine_commits_if_one_fails(sender: SharedSender, stream: Items, expected: Shapes) -> None:
    other = {**expected, "norm.weight": (64,)}
    good, bad = Worker(lambda: shared(sender.address, expected)), Worker(lambda: shared(sender.address, other))
    with pytest.raises(UserError, match=r"gave up: refit: 'norm\.weight' is \[128\]; the model wants \[64\]"):
        sender.send(iter(stream), version=1)
    with pytest.raises(UserError, match=r"norm\.weight"):
        bad.outcome()
    with pytest.raises(UserError, match="not committed, the sender gave up"):
        good.outcome()
    engines = [Worker(lambda: shared(sender.address, expected)) for _ in range(2)]
    sender.send(iter(stream), version=2)
    assert [engine.outcome().version for engine in engines] == [2, 2]


def test_no_engine_commits_if_the_export_raises(sender: SharedSender, stream: Items, expected: Shapes) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream[:200]
        raise UserError("layers.3.attn.wkv.weight[0, 0] is nan")

    engines = [Worker(lambda: shared(sender.address, expected)) for _ in range(2)]
    with pytest.raises(UserError, match="is nan"):
        sender.send(broken(), version=1)
    for engine in engines:
        with pytest.raises(UserError, match=r"the sender gave up: layers\.3.* is nan"):
            engine.outcome()


def test_silence_ends_in_a_timeout(stream: Items) -> None:
    sender = SharedSender(capacity_bytes=CAPACITY, receivers=1, timeout=0.2)
    try:
        with pytest.raises(UserError, match=r"0 of 1 receivers connected within 0\.2 s"):
            sender.send(iter(stream), version=1)
        mute = Worker(lambda: SharedReceiver(sender.address, timeout=0.2))
        with pytest.raises(UserError, match=r"nothing from receiver 0 for 0\.2 s"):
            sender.send(iter(stream), version=1)
        receiver = mute.outcome()
        with pytest.raises(UserError, match="the sender gave up|hung up"):
            for _ in receiver.buckets():
                pass
    finally:
        sender.close()
    with pytest.raises(UserError, match=r"no sender listens at .* after 0\.1 s"):
        SharedReceiver(sender.address, timeout=0.1)


def test_a_wrong_key_is_not_served(sender: SharedSender, stream: Items) -> None:
    from multiprocessing import AuthenticationError

    stranger = Worker(lambda: SharedReceiver(Address(sender.address.socket, "00" * 16), timeout=1))
    with pytest.raises((AuthenticationError, UserError)):
        sender.send(iter(stream), version=1)
    with pytest.raises((AuthenticationError, UserError, OSError, EOFError)):
        stranger.outcome()
