"""Fill buckets of bounded size with a stream of weights, for an engine to load one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import fused_group
from nemo_rl_dsv4.refit.expert_run import ExpertRun, raise_first_damaged
from nemo_rl_dsv4.refit.export import ExportedWeights, Run, items_of_run
from nemo_rl_dsv4.refit.manifest import Manifest, describe
from nemo_rl_dsv4.refit.placement import Placement, copy_items, padded, views
from nemo_rl_dsv4.refit.report import Stream

Items = list[tuple[str, torch.Tensor]]

_COPIED_TOGETHER = 64 << 20  # bytes that wait to be copied by one launch


def pack_buckets(stream: Stream, capacity_bytes: int) -> Iterator[Items]:
    """Yield lists of neighbours of at most `capacity_bytes`, in stream order.

    A weight, its scale and its fused partners (`wq_a`+`wkv`, a compressor's `wkv`+`wgate`, `w1`+`w3`) are never split:
    an engine quantizes or concatenates them together. Load all buckets, then finalize once.

    Raises:
        UserError: one such group alone exceeds the capacity.
    """
    bucket, used = [], 0
    for group, size in _groups(stream, capacity_bytes):
        if used + size > capacity_bytes:
            yield bucket
            bucket, used = [], 0
        bucket += group
        used += size
    if bucket:
        yield bucket


@dataclass
class Bucket:
    """A filled buffer: its number, whether it is the last of the refit, uint8 memory, and what lies where in it."""

    index: int
    last: bool
    buffer: torch.Tensor
    placed: list[Placement]

    def items(self) -> Items:
        """(official name, view into the buffer) in stream order."""
        return list(zip((p.name for p in self.placed), views(self.buffer, self.placed), strict=True))


def fill_buckets(stream: Stream, buffer_of: Callable[[int], torch.Tensor]) -> Iterator[Bucket]:
    """Fill one buffer after the other. Routed experts of an export are quantized straight into them.

    The same tensors as of `pack_buckets`, in the same order; what must stay together does. Work of a GPU is queued, not
    waited for; whether all values were finite is asked before the last bucket is handed out.

    Args:
        stream: what `export_weights` returns, or any other pairs.
        buffer_of: uint8 memory for bucket number i, asked for once bucket i-1 has been handed out and its consumer has
            asked for the next. It may be the same each time.

    Raises:
        UserError: a group that must stay together exceeds a buffer; what the export raises.
    """
    filling = _Filling(buffer_of)
    pieces = stream.pieces() if isinstance(stream, ExportedWeights) else iter([iter(stream)])
    for piece in pieces:
        if isinstance(piece, Run) and filling.takes(piece):
            yield from filling.add_run(piece)
        else:
            yield from filling.add_items(items_of_run(piece) if isinstance(piece, Run) else piece)
    yield from filling.finish()


def write_buckets(
    stream: Stream, buffer_of: Callable[[int], torch.Tensor], *, version: int, scratch: torch.Tensor | None = None
) -> Iterator[tuple[Manifest, torch.Tensor]]:
    """Fill buckets as `fill_buckets` does and describe each by a manifest with checksums.

    Args:
        stream, buffer_of: see `fill_buckets`.
        version: policy version.
        scratch: memory of the GPU that holds the weights, where the buffers are the host's: a bucket is filled and
            summed there, and copied to its buffer as a whole.
    """
    for bucket in fill_buckets(stream, buffer_of if scratch is None else lambda _: scratch):
        manifest = describe(bucket.buffer, bucket.placed, version=version, index=bucket.index, last=bucket.last)
        if scratch is None:
            yield manifest, bucket.buffer
            continue
        target = buffer_of(bucket.index)
        target[: manifest.bytes].copy_(scratch[: manifest.bytes])
        yield manifest, target


class _Filling:
    """The bucket that is being filled."""

    def __init__(self, buffer_of: Callable[[int], torch.Tensor]) -> None:
        self._buffer_of, self._index, self._used = buffer_of, 0, 0
        self._buffer = buffer_of(0)
        self._placed: list[Placement] = []
        self._copies: Items = []
        self._copied: list[Placement] = []
        self._damaged: torch.Tensor | None = None
        self._runs: list[tuple[ExpertRun, int, int]] = []

    def takes(self, run: Run) -> bool:
        """Whether a run can be quantized in place: on the buffers' device, pieces no larger than a buffer."""
        return run.device == self._buffer.device and run.fits(self._buffer.numel())

    def add_run(self, run: Run) -> Iterator[Bucket]:
        first = 0
        if self._damaged is None:
            self._damaged = torch.zeros(1, dtype=torch.int32, device=run.device)
        while first < len(run):
            count = run.piece(first, self._buffer.numel() - self._used)
            if not count:
                yield self._close(last=False)
                self._open()
                continue
            self._placed += run.encode(first, count, self._buffer, self._used, self._damaged)
            if isinstance(run, ExpertRun):
                self._runs.append((run, first, count))
            self._used += sum(run.layout.sections(count))
            first += count

    def add_items(self, items: Stream) -> Iterator[Bucket]:
        for group, size in _groups(items, self._buffer.numel()):
            if self._used + size > self._buffer.numel():
                yield self._close(last=False)
                self._open()
            for name, tensor in group:
                length = tensor.numel() * tensor.element_size()
                self._copied.append(Placement(name, tensor.dtype, tuple(tensor.shape), self._used, length))
                self._placed.append(self._copied[-1])
                self._used += padded(length)
            self._copies += group
            if sum(placement.bytes for placement in self._copied) > _COPIED_TOGETHER:
                self._copy()

    def finish(self) -> Iterator[Bucket]:
        if self._damaged is not None and bool(self._damaged):
            raise_first_damaged(self._runs)
        if self._placed:
            yield self._close(last=True)

    def _open(self) -> None:
        self._index, self._used = self._index + 1, 0
        self._buffer = self._buffer_of(self._index)

    def _close(self, *, last: bool) -> Bucket:
        self._copy()
        bucket = Bucket(self._index, last, self._buffer, self._placed)
        self._placed = []
        return bucket

    def _copy(self) -> None:
        copy_items([tensor for _, tensor in self._copies], self._buffer, self._copied)
        self._copies, self._copied = [], []


def _groups(stream: Stream, capacity_bytes: int) -> Iterator[tuple[Items, int]]:
    """Neighbours that stay together, and the bytes they take."""
    for label, members in groupby(stream, key=lambda item: fused_group(item[0])):
        group = list(members)
        size = sum(padded(tensor.numel() * tensor.element_size()) for _, tensor in group)
        if size > capacity_bytes:
            raise UserError(
                f"refit: {label} takes {size} bytes together and a bucket holds {capacity_bytes}; "
                "raise refit_buffer_size_gb"
            )
        yield group, size


def bucket_bytes(refit_buffer_size_gb: float) -> int:
    """Bytes of a bucket of `refit_buffer_size_gb` GiB."""
    return int(refit_buffer_size_gb * 2**30)
