"""Matrix products as an engine's tensor cores take them: BF16 or TF32 operands, float32 sums, a float32 result.

What an engine multiplies so: attention scores (FlashMLA), the compressors' and the router's projections and the head
(`torch.mm(..., out_dtype=torch.float32)` or a BF16 GEMM), and the projection of hyper-connections (TF32). The products
of such operands are exact in float32, so only the sum can differ from a float32 matrix product of the same values: by
its order, and because a tensor core keeps fewer bits while it adds. Measured against vLLM's kernels that moves 6e-4 of
the BF16 values of an attention output, and on tensor cores 1e-5 (docs/alignment.md).

On CPUs and AMD GPUs the same operands are multiplied in float32. Gradients are float32 products everywhere.

Shapes: B batch, M rows, K summed, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError

SPLIT = 256
"""Columns of a TF32 product that are summed by themselves, as DeepGEMM's split-K sums them while an engine decodes.

vLLM 0.26.0 gives a split four blocks of 64 columns while its GPU has more multiprocessors than the product has tiles of
64 rows times splits: on an H200 in batches of 17 to 128 tokens at a width of 4096, to 256 at 2048. A longer part (a
large prefill) loses more bits, since a tensor core cuts each sum off: 1e-5 relative at 4096 columns.
"""

_enabled = True


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products of `x` are taken on tensor cores here: on NVIDIA GPUs."""
    return _enabled and x.is_cuda and torch.version.hip is None


@contextmanager
def without_tensor_cores() -> Iterator[None]:
    """Take the products of this module in float32 for the duration, to measure what that changes."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


class _Bf16Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        ctx.save_for_backward(a, b)
        if not a.is_cuda:
            return torch.bmm(a.float(), b.float().transpose(1, 2))
        if a.shape[0] == 1:
            return torch.mm(a[0], b[0].t(), out_dtype=torch.float32)[None]
        return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = torch.bmm(grads[0], b.float()).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_b = torch.bmm(grads[0].transpose(1, 2), a.float()).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def bf16_scores(query: Tensor, key: Tensor) -> Tensor:
    """float32 [B, H, S, K] of queries [B, H, S, D] and keys [B, 1, K, D] or [B, H, K, D] that hold BF16 values."""
    if not on_tensor_cores(query) or query.numel() == 0 or key.numel() == 0:
        return torch.matmul(query.float(), key.float().transpose(2, 3))
    batch, heads, length, width = query.shape
    if key.shape[1] not in (1, heads):
        raise NumericsError(f"{key.shape[1]} heads of keys for {heads} heads of queries; wanted 1 or {heads}")
    rows = batch if key.shape[1] == 1 else batch * heads
    scores = _Bf16Product.apply(query.reshape(rows, -1, width), key.reshape(rows, -1, width))
    return scores.view(batch, heads, length, key.shape[2])


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 [..., N] of `x` [..., K] and a weight [N, K], both of BF16 values in BF16 or float32."""
    if not on_tensor_cores(x) or x.numel() == 0:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out = _Bf16Product.apply(x.reshape(1, -1, x.shape[-1]), weight[None]).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


@torch.library.custom_op("nemo_rl_dsv4::tf32_product", mutates_args=())
def tf32_product(x: Tensor, weight: Tensor, split: int) -> Tensor:
    """float32 [M, N] of BF16 [M, K] and float32 [N, K] of TF32 values; on a GPU in parts of `split` columns.

    An operator of its own, so that torch's dispatch modes see a product (`mismatch.summation`).
    """
    if not x.is_cuda:
        return F.linear(x.float(), weight)
    from nemo_rl_dsv4.numerics.fused import tf32

    return tf32.tf32_product(x, weight, split)


class _Tf32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtype, narrow = x.dtype, x.to(torch.bfloat16)
        ctx.save_for_backward(narrow, weight)
        return tf32_product(narrow, weight, SPLIT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = (grads[0] @ weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grads[0].t() @ x.float() if ctx.needs_input_grad[1] else None


def tf32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [..., N] of a float32 `x` [..., K] of BF16 values and a float32 weight [N, K] of TF32 values."""
    if not on_tensor_cores(x) or x.numel() == 0:
        return F.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    return _Tf32Product.apply(flat, weight.contiguous()).view(*x.shape[:-1], weight.shape[0])
