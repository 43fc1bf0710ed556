"""Inverse RoPE and group rounding of the attention output in one pass, and its backward.

Reference: :mod:`nemo_rl_dsv4.numerics.rotary`. Products and sums are not contracted to fused multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    fake_rounded,
    limit_of,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.spec import QuantSpec

TILE_ELEMENTS = 4096
NUM_WARPS = 8


@triton.jit
def _rotated(
    x_ptr,
    cos_ptr,
    sin_ptr,
    start,
    column,
    token,
    inside,
    x,
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    TURN: tl.constexpr,
):
    """``x`` with the last 2*PAIRS channels of every head of HEAD channels turned; TURN -1 is the inverse rotation.

    ``start`` is the offset of each row and ``column`` the channel in it; the partner of a channel is column ^ 1, as
    heads and rotated parts begin at even channels.
    """
    channel = column % HEAD - (HEAD - 2 * PAIRS)
    turns = inside & (channel >= 0)
    partner = tl.load(x_ptr + start + (column ^ 1), mask=turns, other=0.0).to(tl.float32)
    angle = token * PAIRS + (channel >> 1)
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0) * TURN
    even = (channel & 1) == 0
    turned = tl.where(even, x * cos - partner * sin, x * cos + partner * sin)
    return tl.where(turns, turned, x)


@triton.jit
def _forward_kernel(
    o_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    carry_ptr,
    groups,
    groups_per_row,
    columns,
    rows_per_token,
    limit,
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
    LOG2F: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH)
    row = (group // groups_per_row).to(tl.int64)[:, None]
    column = (group % groups_per_row)[:, None] * GROUP + lane[None, :]
    inside = (group < groups)[:, None] & (lane < GROUP)[None, :] & (column < columns)
    start = row * columns
    x = tl.load(o_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    x = _rotated(o_ptr, cos_ptr, sin_ptr, start, column, row // rows_per_token, inside, x, HEAD, PAIRS, -1.0)
    scale = scale_from_amax(amax_bits(x, 1), carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F)
    y = fake_rounded(x, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
    store_rounded(y_ptr + start + column, y, inside)


@triton.jit
def _backward_kernel(
    grad_ptr, cos_ptr, sin_ptr, out_ptr, columns, HEAD: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    start = token * columns
    grad = tl.load(grad_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    turned = _rotated(grad_ptr, cos_ptr, sin_ptr, start, column, token, inside, grad, HEAD, PAIRS, 1.0)
    store_rounded(out_ptr + start + column, turned, inside)


def inverse_rope_forward(o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec, n_groups: int) -> Tensor:
    """``o`` [..., H, D] turned back by cos, sin [..., P] and rounded: [..., n_groups, H/n_groups * D], contiguous."""
    o, cos, sin = o.contiguous(), cos.contiguous(), sin.contiguous()
    columns = o.shape[-2] // n_groups * o.shape[-1]
    y = torch.empty((*o.shape[:-2], n_groups, columns), dtype=o.dtype, device=o.device)
    group = min(spec.block[1], columns)
    per_row = triton.cdiv(columns, group)
    width = triton.next_power_of_2(group)
    tile = max(1, TILE_ELEMENTS // width)
    groups = y.numel() // columns * per_row
    _forward_kernel[(triton.cdiv(groups, tile),)](
        o,
        cos,
        sin,
        y,
        groups=groups,
        groups_per_row=per_row,
        columns=columns,
        rows_per_token=n_groups,
        limit=limit_of(torch.float32),
        HEAD=o.shape[-1],
        PAIRS=cos.shape[-1],
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **rounding_arguments(spec, o),
    )
    return y


def inverse_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient [..., H, D] rotated forward, contiguous, in its dtype."""
    grad, cos, sin = grad.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(grad)
    columns = grad.shape[-2] * grad.shape[-1]
    block = min(2048, triton.next_power_of_2(columns))
    _backward_kernel[(grad.numel() // columns, triton.cdiv(columns, block))](
        grad,
        cos,
        sin,
        out,
        columns=columns,
        HEAD=grad.shape[-1],
        PAIRS=cos.shape[-1],
        BLOCK=block,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out
