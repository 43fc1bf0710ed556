"""Mixing of hyper-connection streams in one pass, and its backward in another.

Reference: :mod:`nemo_rl_dsv4.numerics.hyper_connections`; sums of the backward are taken in other orders.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.fused import rounding
from nemo_rl_dsv4.numerics.fused.rounding import store_rounded
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _forward_kernel(
    post_ptr,
    comb_ptr,
    out_ptr,
    streams_ptr,
    y_ptr,
    width,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    j = tl.arange(0, N)
    x = tl.load(out_ptr + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(post_ptr + token * N + j)[:, None] * x[None, :]
    for k in tl.static_range(N):
        r = tl.load(streams_ptr + (token * N + k) * width + channel, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(comb_ptr + (token * N + k) * N + j)[:, None] * r[None, :]
    where = (token * N + j)[:, None] * width + channel[None, :]
    store_rounded(y_ptr + where, mixed, inside[None, :], True, NATIVE)


@triton.jit
def _backward_kernel(
    grad_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    streams_ptr,
    grad_post_ptr,
    grad_comb_ptr,
    grad_out_ptr,
    grad_streams_ptr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    cell = (token * N + j)[:, None] * N + j[None, :]  # [k, j]
    post = tl.load(post_ptr + token * N + j)
    comb = tl.load(comb_ptr + cell)
    grad_post = post * 0.0
    grad_comb = comb * 0.0
    for start in range(0, WIDTH, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < WIDTH
        where = (token * N + j)[:, None] * WIDTH + channel[None, :]
        g = tl.load(grad_ptr + where, mask=inside[None, :], other=0.0).to(tl.float32)
        r = tl.load(streams_ptr + where, mask=inside[None, :], other=0.0).to(tl.float32)
        x = tl.load(out_ptr + token * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
        grad_post += tl.reduce(g * x[None, :], 1, _add)
        grad_comb += tl.reduce(r[:, None, :] * g[None, :, :], 2, _add)
        grad_x = tl.reduce(post[:, None] * g, 0, _add)
        store_rounded(grad_out_ptr + token * WIDTH + channel, grad_x, inside, True, NATIVE)
        grad_r = tl.reduce(comb[:, :, None] * g[None, :, :], 1, _add)
        store_rounded(grad_streams_ptr + where, grad_r, inside[None, :], True, NATIVE)
    tl.store(grad_post_ptr + token * N + j, grad_post)
    tl.store(grad_comb_ptr + cell, grad_comb)


def mix_streams_forward(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """``post_j out + sum_k comb_kj streams_k`` [..., N, D], contiguous; N a power of two."""
    count, width = streams.shape[-2:]
    y = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    shape = SHAPES["mix_streams"]
    block = min(shape.elements // count, triton.next_power_of_2(width))
    _forward_kernel[(streams.numel() // (count * width), triton.cdiv(width, block))](
        post.contiguous(),
        comb.contiguous(),
        out.contiguous(),
        streams.contiguous(),
        y,
        width,
        N=count,
        BLOCK=block,
        NATIVE=rounding.NATIVE,
        num_warps=shape.warps,
    )
    return y


def mix_streams_backward(
    grad: Tensor, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of post, comb (float32), out and streams (their dtype), contiguous."""
    count, width = streams.shape[-2:]
    post, comb = post.contiguous(), comb.contiguous()
    grad_post, grad_comb = torch.empty_like(post), torch.empty_like(comb)
    grad_out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    grad_streams = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    shape = SHAPES["mix_streams_backward"]
    _backward_kernel[(streams.numel() // (count * width),)](
        grad.contiguous(),
        post,
        comb,
        out.contiguous(),
        streams.contiguous(),
        grad_post,
        grad_comb,
        grad_out,
        grad_streams,
        WIDTH=width,
        N=count,
        BLOCK=min(shape.elements // count, triton.next_power_of_2(width)),
        NATIVE=rounding.NATIVE,
        num_warps=shape.warps,
    )
    return grad_post, grad_comb, grad_out, grad_streams
