"""Write a safetensors file tensor by tensor: the header first, from names, dtypes and shapes alone."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from nemo_rl_dsv4.model.safetensors_file import DTYPES

Item = TypeVar("Item")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """One file whose tensors arrive one by one, in any order.

    Tensors of wider dtypes stand first, so that each is aligned to its element size.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        """Create `path` with the header of `entries` and room for all of them."""
        self.path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[Entry, int]] = {}
        position = 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            self._places[entry.name] = (entry, position)
            header[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [position, position + entry.bytes],
            }
            position += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.flush()
        os.truncate(self._file.fileno(), self._data + position)

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Write one tensor, exactly as announced; returns the CRC-32 of its bytes."""
        entry, offset = self._places.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, announced {entry.dtype} {entry.shape}")
        content = bytes_of(tensor)
        view, position = content, self._data + offset
        while len(view):
            count = os.pwrite(self._file.fileno(), view, position)
            view, position = view[count:], position + count
        return zlib.crc32(content)

    def close(self) -> None:
        """Write everything through to the disk; an announced tensor that never came is an error."""
        if self._places:
            raise ValueError(f"{self.path}: {len(self._places)} tensors never came, such as {min(self._places)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the unfinished file."""
        self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def cut_into_shards(items: Sequence[Item], size: Callable[[Item], int], max_bytes: int) -> list[list[Item]]:
    """Distribute items, in order and each whole, over shards of up to `max_bytes` (more for one large item)."""
    shards: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if shards[-1] and used + size(item) > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += size(item)
    return shards


def shard_name(number: int, count: int) -> str:
    """Return the usual file name of shard `number` (from 0) of `count`."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
