"""Blocks of the last two dims as views: whole and short blocks apart, large tensors a chunk at a time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Float32 work buffers hold at most this many elements, or one block row if that is longer; a CPU likes them in cache.
CHUNK_ELEMENTS = 1 << 19
GPU_CHUNK_ELEMENTS = 1 << 26


def chunk_limit(x: Tensor) -> int:
    """Elements of ``x`` to work on at a time; compiled code has no buffers of its own to bound."""
    if torch.compiler.is_compiling():
        return x.numel()
    return GPU_CHUNK_ELEMENTS if x.is_cuda else CHUNK_ELEMENTS


def grid_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scale grid of a tensor [..., rows, cols]."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def blocked(piece: Tensor, block: tuple[int, int]) -> Tensor:
    """View [..., m*br, n*bc] (or one short block a side) as [..., m, br, n, bc]."""
    rows, cols = min(block[0], piece.shape[-2]), min(block[1], piece.shape[-1])
    return piece.reshape(*piece.shape[:-2], piece.shape[-2] // rows, rows, piece.shape[-1] // cols, cols)


def _spans(size: int, block: int) -> list[tuple[slice, slice]]:
    """(elements, blocks) slices of the whole blocks and of the short last block of one dim."""
    whole = size // block
    spans = [(slice(0, whole * block), slice(0, whole))] if whole else []
    return spans + ([(slice(whole * block, size), slice(whole, whole + 1))] if size % block else [])


def regions(shape: torch.Size, block: tuple[int, int]) -> Iterator[tuple[tuple, tuple]]:
    """Index pairs (into the tensor, into the scale grid) of up to four regions, each made of equal blocks."""
    for rows, row_blocks in _spans(shape[-2], block[0]):
        for cols, col_blocks in _spans(shape[-1], block[1]):
            yield (..., rows, cols), (..., row_blocks, col_blocks)


def chunks(x: Tensor, block_rows: int, prefix: tuple = ()) -> Iterator[tuple[tuple, tuple]]:
    """Index pairs (into ``x``, into the scale grid) of slices small enough to work on, each of whole block rows."""
    limit = chunk_limit(x)
    if x.numel() <= limit:
        if x.numel():
            yield (*prefix, ...), (*prefix, ...)
    elif x.dim() > 2 and x[0].numel() > limit:
        for i in range(x.shape[0]):
            yield from chunks(x[i], block_rows, (*prefix, i))
    elif x.dim() > 2:
        step = limit // x[0].numel()
        for i in range(0, x.shape[0], step):
            yield (*prefix, slice(i, i + step)), (*prefix, slice(i, i + step))
    else:
        step = max(1, limit // (block_rows * x.shape[1]))
        for block in range(0, math.ceil(x.shape[0] / block_rows), step):
            rows = slice(block * block_rows, min((block + step) * block_rows, x.shape[0]))
            yield (*prefix, rows), (*prefix, slice(block, block + step))
