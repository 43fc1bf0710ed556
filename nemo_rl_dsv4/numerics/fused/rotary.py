"""Inverse RoPE and group rounding of the attention output in one pass, and the rotation of its backward.

Reference: :mod:`nemo_rl_dsv4.numerics.rotary`. Products and sums are not contracted to fused multiply-adds.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
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
def _rotated(x, cos_ptr, sin_ptr, pair, token, inside, PAIRS: tl.constexpr, TURN: tl.constexpr):
    """``x`` [N, W] with its channel pairs turned where ``pair`` [N, W/2] is one of the PAIRS; TURN -1 turns back."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    turns = inside & (pair >= 0)
    cos = tl.load(cos_ptr + token * PAIRS + pair, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=turns, other=0.0) * TURN
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    even = tl.where(turns, turned_even, even)
    odd = tl.where(turns, turned_odd, odd)
    return tl.reshape(tl.join(even, odd), x.shape)


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    carry_ptr,
    groups,
    groups_per_row,
    columns,
    rows_per_token,
    limit,
    QUANTIZE: tl.constexpr,  # turn back and round, else turn forward only
    ALIGNED: tl.constexpr,  # no group spans two heads
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
    half_lane = tl.arange(0, WIDTH // 2)
    row = group // groups_per_row
    first = (group % groups_per_row) * GROUP
    column = first[:, None] + lane[None, :]
    inside = (group < groups)[:, None] & (lane < GROUP)[None, :] & (column < columns)
    offset = row.to(tl.int64)[:, None] * columns + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    # Heads and groups begin at even channels, so that both halves of a pair are inside or both are not.
    if ALIGNED:
        channel = (first % HEAD)[:, None] + 2 * half_lane[None, :]
    else:
        channel = (first[:, None] + 2 * half_lane[None, :]) % HEAD
    pair = (channel - (HEAD - 2 * PAIRS)) // 2
    pair_inside = (group < groups)[:, None] & (2 * half_lane < GROUP)[None, :]
    pair_inside = pair_inside & (channel >= HEAD - 2 * PAIRS) & (first[:, None] + 2 * half_lane[None, :] < columns)
    token = (row // rows_per_token).to(tl.int64)[:, None]
    if QUANTIZE:
        x = _rotated(x, cos_ptr, sin_ptr, pair, token, pair_inside, PAIRS, -1.0)
        scale = scale_from_amax(amax_bits(x, 1), carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F)
        x = fake_rounded(x, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
    else:
        x = _rotated(x, cos_ptr, sin_ptr, pair, token, pair_inside, PAIRS, 1.0)
    store_rounded(y_ptr + offset, x, inside)


def inverse_rope_forward(o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec, n_groups: int) -> Tensor:
    """``o`` [..., H, D] turned back by cos, sin [..., P] and rounded: [..., n_groups, H/n_groups * D], contiguous."""
    columns = o.shape[-2] // n_groups * o.shape[-1]
    y = torch.empty((*o.shape[:-2], n_groups, columns), dtype=o.dtype, device=o.device)
    _launch(o, cos, sin, y, spec, n_groups, quantize=True)
    return y


def inverse_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient [..., H, D] rotated forward, contiguous, in its dtype."""
    y = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _launch(grad, cos, sin, y, QuantSpec(block=(1, 128)), 1, quantize=False)
    return y


def _launch(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, spec: QuantSpec, n_groups: int, *, quantize: bool) -> None:
    columns = x.shape[-2] // n_groups * x.shape[-1]
    group = min(spec.block[1], columns)
    per_row = triton.cdiv(columns, group)
    width = triton.next_power_of_2(group)
    tile = max(1, TILE_ELEMENTS // width)
    groups = y.numel() // columns * per_row
    _rope_kernel[(triton.cdiv(groups, tile),)](
        x.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        y,
        groups=groups,
        groups_per_row=per_row,
        columns=columns,
        rows_per_token=n_groups,
        limit=limit_of(torch.float32),
        QUANTIZE=quantize,
        ALIGNED=x.shape[-1] % group == 0,
        HEAD=x.shape[-1],
        PAIRS=cos.shape[-1],
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **rounding_arguments(spec, x),
    )
