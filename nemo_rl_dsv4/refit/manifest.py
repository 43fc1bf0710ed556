"""What a bucket holds: names, dtypes, shapes, places and checksums, and which policy version they belong to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.checksum import range_checksums, with_head

ALIGNMENT = 16
"""Bytes; every tensor starts at a multiple of it, so that it can be viewed in its own dtype."""


@dataclass(frozen=True)
class Entry:
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
        return 0 if not self.entries else self.entries[-1].offset + padded(self.entries[-1].bytes)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read `to_json`'s line.

        Raises:
            UserError: not a manifest.
        """
        try:
            fields = json.loads(text)
            entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields.pop("entries"))
            return cls(entries=entries, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"refit: not a bucket manifest ({error}): {text[:80]!r}") from error


def padded(size: int) -> int:
    """`size` bytes rounded up to the alignment."""
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


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
    places, offset = [], 0
    for name, tensor in items:
        size = tensor.numel() * tensor.element_size()
        if offset + padded(size) > buffer.numel():
            raise UserError(f"refit: bucket {index} needs {offset + size} bytes at {name}; it has {buffer.numel()}")
        places.append((offset, size))
        if size % ALIGNMENT:
            buffer[offset + size : offset + padded(size)].zero_()
        offset += padded(size)
    sources = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in items]
    targets = [buffer[start : start + size] for start, size in places]
    if buffer.is_cuda and all(source.device == buffer.device for source in sources):
        torch._foreach_copy_(targets, sources)  # one launch for all of them
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    entries = [
        Entry(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            start,
            size,
            with_head(name, tensor.dtype, tensor.shape, value),
        )
        for (name, tensor), (start, size), value in zip(items, places, range_checksums(buffer, places), strict=True)
    ]
    return Manifest(version, index, last, tuple(entries))


def read_bucket(manifest: Manifest, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into a received buffer, after all of them have been compared with their checksums.

    Raises:
        UserError: an entry that does not fit, an unknown dtype, or bytes that changed on the way.
    """
    views = [(entry.name, _view(entry, buffer)) for entry in manifest.entries]
    sums = range_checksums(buffer, [(entry.offset, entry.bytes) for entry in manifest.entries])
    for entry, (_, view), value in zip(manifest.entries, views, sums, strict=True):
        found = with_head(entry.name, view.dtype, view.shape, value)
        if found != entry.checksum:
            raise UserError(
                f"refit: tensor {entry.name!r} of bucket {manifest.index} arrived with checksum {found:016x}, sent "
                f"with {entry.checksum:016x}; the transfer is damaged"
            )
    yield from views


def _view(entry: Entry, buffer: torch.Tensor) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"refit: tensor {entry.name!r} has dtype {entry.dtype!r}, which torch does not know")
    wanted = math.prod(entry.shape) * dtype.itemsize
    if entry.bytes != wanted or entry.offset + entry.bytes > buffer.numel():
        raise UserError(
            f"refit: tensor {entry.name!r} has {entry.bytes} bytes at {entry.offset} of {buffer.numel()}; "
            f"{entry.dtype} {list(entry.shape)} needs {wanted}"
        )
    return buffer[entry.offset : entry.offset + entry.bytes].view(dtype).view(entry.shape)
