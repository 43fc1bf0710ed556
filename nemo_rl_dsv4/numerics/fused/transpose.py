"""Matrices of bytes turned over: codes of a stack that training keeps as [in, out], as a checkpoint has them.

Reference: ``x.transpose(-1, -2).contiguous()``.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(2).to(tl.int64) * rows * columns
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x_ptr + first + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    turned = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(y_ptr + first + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(tile), mask=turned)


def transpose_bytes(x: Tensor, out: Tensor | None = None) -> Tensor:
    """uint8 [matrices, rows, columns] as uint8 [matrices, columns, rows], both contiguous; into ``out`` if given."""
    matrices, rows, columns = x.shape
    y = torch.empty((matrices, columns, rows), dtype=torch.uint8, device=x.device) if out is None else out
    grid = (triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE), matrices)
    _transpose_kernel[grid](x, y, rows, columns, TILE=_TILE, num_warps=8)
    return y
