"""BF16 rows times TF32 weights on tensor cores, to the bits of DeepGEMM's `tf32_hc_prenorm_gemm` on Hopper.

A tensor core cuts off what a sum loses at each step of eight columns, so the result depends on where sums start. The
parts here are DeepGEMM's, and so is the order in which vLLM's next kernel adds them. The products were compared on an
H200, with the parts added in order by torch: for 64 to 3360 rows of 2048 and 8192 columns, 2 to 32 parts, every sum is
the same to the bit (docs/alignment.md); `_sum_kernel`, which adds them here, does it in that order
(tests/gpu/test_products.py).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError

ROWS, STEP = 64, 64


@triton.jit
def _parts_kernel(
    x_ptr, w_ptr, out_ptr, rows, n, width, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    part = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, N)
    total = tl.full((M, N), 0.0, tl.float32)
    for start in range(0, SPLIT, K):
        k = part * SPLIT + start + tl.arange(0, K)
        inside = k < width
        x = tl.load(x_ptr + row[:, None] * width + k[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        mask = (column < n)[None, :] & inside[:, None]
        w = tl.load(w_ptr + column[None, :] * width + k[:, None], mask=mask, other=0.0)
        total = tl.dot(x.to(tl.float32), w, total, input_precision="tf32")
    where = (part * rows + row[:, None]) * n + column[None, :]
    tl.store(out_ptr + where, total, mask=(row < rows)[:, None] & (column < n)[None, :])


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    where = parts_ptr + at
    for _ in range(COUNT):
        total += tl.load(where, mask=at < size, other=0.0)
        where += size
    tl.store(out_ptr + at, total, mask=at < size)


def tf32_product(x: Tensor, weight: Tensor, split: int) -> Tensor:
    """float32 [M, N] of `x` [M, K] BF16 and `weight` [N, K] float32 of TF32 values.

    Args:
        x: rows, contiguous or not.
        weight: contiguous.
        split: columns that are summed by themselves, a multiple of 64; the parts are added in order.
    """
    (rows, width), n = x.shape, weight.shape[0]
    if split % STEP:
        raise NumericsError(f"parts of {split} columns; wanted a multiple of {STEP}")
    parts = triton.cdiv(width, split)
    sums = torch.empty(parts, rows, n, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROWS), parts)
    _parts_kernel[grid](
        x.contiguous(),
        weight,
        sums,
        rows,
        n,
        width,
        SPLIT=split,
        M=ROWS,
        N=max(16, triton.next_power_of_2(n)),
        K=STEP,
        num_warps=4,
    )
    _sum_kernel[(triton.cdiv(rows * n, 1024),)](sums, out, rows * n, COUNT=parts, BLOCK=1024)
    return out
