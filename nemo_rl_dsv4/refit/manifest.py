"""What a bucket holds: names, dtypes, shapes, places and checksums, and which policy version they belong to."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.checksum import head_of, start_range_checksums, with_head
from nemo_rl_dsv4.refit.placement import Placement, copy_items, padded, views


class Entry(NamedTuple):
    """One tensor of a bucket: official name, torch dtype without `torch.`, shape, first byte, bytes, checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """Contents of one bucket.

    Attributes:
        version: policy version, the number of optimizer steps behind these weights.
        index: number of the bucket in its refit, from 0.
        last: no bucket follows.
        entries: tensors in stream order.
    """

    version: int
    index: int
    last: bool
    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the bucket's buffer, padding included."""
        return padded(max((entry.offset + entry.bytes for entry in self.entries), default=0))

    def to_fields(self) -> dict[str, Any]:
        """Plain values, quick to pickle."""
        return {**vars(self), "entries": [tuple(entry) for entry in self.entries]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Manifest:
        """Read what `to_fields` gave.

        Raises:
            UserError: not a manifest.
        """
        try:
            entries = tuple(Entry(n, dtype, tuple(shape), *rest) for n, dtype, shape, *rest in fields["entries"])
            return cls(**{**fields, "entries": entries})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"refit: not a bucket manifest ({error}): {str(fields)[:80]!r}") from error

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read `to_json`'s line.

        Raises:
            UserError: not a manifest.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise UserError(f"refit: not a bucket manifest ({error}): {text[:80]!r}") from error
        return cls.from_fields(fields)


def write_bucket(
    items: list[tuple[str, torch.Tensor]], buffer: torch.Tensor, *, version: int, index: int, last: bool
) -> Manifest:
    """Copy tensors into a byte buffer and describe them.

    Args:
        items: neighbours of a stream, see `pack_buckets`.
        buffer: uint8 [capacity], on any device.
        version: policy version.
        index: number of the bucket.
        last: no bucket follows.

    Raises:
        UserError: the buffer is too small.
    """
    placed, offset = [], 0
    for name, tensor in items:
        size = tensor.numel() * tensor.element_size()
        if offset + padded(size) > buffer.numel():
            raise UserError(f"refit: bucket {index} needs {offset + size} bytes at {name}; it has {buffer.numel()}")
        placed.append(Placement(name, tensor.dtype, tuple(tensor.shape), offset, size))
        offset += padded(size)
    copy_items([tensor for _, tensor in items], buffer, placed)
    return describe(buffer, placed, version=version, index=index, last=last)


def describe(
    buffer: torch.Tensor,
    placed: Sequence[Placement],
    *,
    version: int,
    index: int,
    last: bool,
) -> Manifest:
    """Checksum what lies in a buffer and write it down. Waits for the buffer's GPU once."""
    ranges = [(placement.offset, placement.bytes) for placement in placed]
    sums = start_range_checksums(buffer, ranges)
    heads = [head_of(placement.name, placement.dtype, placement.shape) for placement in placed]
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in {placement.dtype for placement in placed}}
    entries = tuple(
        Entry(name, names[dtype], shape, offset, size, with_head(head, value))
        for (name, dtype, shape, offset, size), head, value in zip(placed, heads, sums.tolist(), strict=True)
    )
    return Manifest(version, index, last, entries)


def read_bucket(manifest: Manifest, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into a received buffer, after all of them have been compared with their checksums.

    Raises:
        UserError: see `check_bucket`.
    """
    placed = check_bucket(manifest, buffer)
    yield from zip((placement.name for placement in placed), views(buffer, placed), strict=True)


def check_bucket(manifest: Manifest, buffer: torch.Tensor) -> list[Placement]:
    """Compare a received buffer with its checksums, where it lies, and return what lies where in it.

    Raises:
        UserError: an entry that does not fit, an unknown dtype, or bytes that changed on the way.
    """
    placed = [_placement(entry, buffer.numel()) for entry in manifest.entries]
    sums = start_range_checksums(buffer, [(entry.offset, entry.bytes) for entry in manifest.entries])
    heads = [head_of(placement.name, placement.dtype, placement.shape) for placement in placed]
    for entry, head, value in zip(manifest.entries, heads, sums.tolist(), strict=True):
        if with_head(head, value) != entry.checksum:
            raise UserError(
                f"refit: tensor {entry.name!r} of bucket {manifest.index} arrived with checksum "
                f"{with_head(head, value):016x}, sent with {entry.checksum:016x}; the transfer is damaged"
            )
    return placed


def _placement(entry: Entry, room: int) -> Placement:
    name, dtype_name, shape, offset, size, _ = entry
    dtype, wanted, step = _size_of(dtype_name, shape)
    if dtype is None:
        raise UserError(f"refit: tensor {name!r} has dtype {dtype_name!r}, which torch does not know")
    if size != wanted or offset < 0 or offset + size > room:
        raise UserError(
            f"refit: tensor {name!r} has {size} bytes at {offset} of {room}; {dtype_name} {list(shape)} needs {wanted}"
        )
    if offset % step:
        raise UserError(f"refit: tensor {name!r} starts at byte {offset}; wanted a multiple of {step}")
    return Placement(name, dtype, shape, offset, size)


@functools.lru_cache(maxsize=1024)
def _size_of(dtype_name: str, shape: tuple[int, ...]) -> tuple[torch.dtype | None, int, int]:
    """dtype, bytes and the step of first bytes of a tensor."""
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        return None, 0, 1
    return dtype, math.prod(shape) * dtype.itemsize, max(dtype.itemsize, 4)
