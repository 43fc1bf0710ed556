"""Where tensors lie in a byte buffer, and views of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16
"""Bytes; a group of tensors starts at a multiple of it, and each tensor at one of its own dtype and of 4."""


class Placement(NamedTuple):
    """One tensor of a buffer: official name, dtype, shape, first byte, bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


def padded(size: int) -> int:
    """`size` bytes rounded up to the alignment."""
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def views(buffer: torch.Tensor, placements: Sequence[Placement]) -> list[torch.Tensor]:
    """View of each tensor in a uint8 buffer; tensors of one kind that lie side by side are viewed at once."""
    kinds: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}
    for i, placement in enumerate(placements):
        kinds.setdefault((placement.dtype, placement.shape), []).append(i)
    found: list[torch.Tensor] = [buffer] * len(placements)
    for (dtype, shape), members in kinds.items():
        size = placements[members[0]].bytes
        for run in _side_by_side(members, placements):
            start = placements[run[0]].offset
            raw = buffer[start : start + size * len(run)]
            for i, view in zip(run, raw.view(dtype).view(len(run), *shape).unbind(0), strict=True):
                found[i] = view
    return found


def _side_by_side(members: list[int], placements: Sequence[Placement]) -> Iterator[list[int]]:
    """Cut a list of placements of one size into runs without gaps, in the order they lie in memory."""
    members = sorted(members, key=lambda i: placements[i].offset)
    offsets = [placements[i].offset for i in members]
    size, start = placements[members[0]].bytes, 0
    for end, (offset, after) in enumerate(itertools.pairwise(offsets), 1):
        if after != offset + size:
            yield members[start:end]
            start = end
    yield members[start:]


def copy_items(sources: Sequence[torch.Tensor], buffer: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Copy tensors to their places in a uint8 buffer, and zeros behind each up to the alignment."""
    pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, (_, _, _, offset, size) in zip(sources, placements, strict=True):
        if size % ALIGNMENT:
            buffer[offset + size : offset + padded(size)].zero_()
        target = buffer[offset : offset + size]
        source = source.detach().contiguous().flatten().view(torch.uint8)
        if not buffer.is_cuda or source.device != buffer.device:
            target.copy_(source)
            continue
        # One launch for all of them, in words: the kernel for bytes moves four at a time.
        wide = size % 8 == 0 and offset % 8 == 0 and source.data_ptr() % 8 == 0
        targets, wholes = pairs.setdefault(torch.int64 if wide else torch.uint8, ([], []))
        targets.append(target.view(torch.int64) if wide else target)
        wholes.append(source.view(torch.int64) if wide else source)
    for targets, wholes in pairs.values():
        torch._foreach_copy_(targets, wholes)
