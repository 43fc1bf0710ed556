"""Inverse RoPE and group rounding of the attention output in one pass, and the rotation of its backward.

Reference: :mod:`nemo_rl_dsv4.numerics.rotary`. Products and sums are not contracted to fused multiply-adds.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.fused.groups import group_offsets
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    fake_rounded,
    load_float,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.spec import QuantSpec


@triton.jit
def _rotated(x, cos_ptr, sin_ptr, pair, token, turns, PAIRS: tl.constexpr, TURN: tl.constexpr):
    """``x`` [N, W] with its channel pairs turned where ``turns`` [N, W/2] says so; TURN -1 turns back."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    cos = tl.load(cos_ptr + token * PAIRS + pair, mask=turns, other=0.0)
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
    groups,
    columns,
    QUANTIZE: tl.constexpr,  # turn back and round, else turn forward only
    ALIGNED: tl.constexpr,  # a head is a number of whole groups
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of ``columns`` channels a token
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    MASKED: tl.constexpr,
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    offset, _, inside = group_offsets(groups, columns, columns, PER_ROW, GROUP, WIDTH, TILE, FLAT)
    x = load_float(x_ptr + offset, inside, MASKED)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH // 2)[None, :]
    # Heads and groups begin at even channels, so that both halves of a pair are inside or both are not.
    if ALIGNED:
        pair = ((group % (HEAD // GROUP)) * (GROUP // 2) - (HEAD // 2 - PAIRS))[:, None] + lane
    else:
        pair = ((group % PER_ROW) * (GROUP // 2))[:, None] + lane
        turns_row = 2 * pair < columns
        pair = pair % (HEAD // 2) - (HEAD // 2 - PAIRS)
    turns = (pair >= 0) & (group < groups)[:, None]
    if not ALIGNED:
        turns = turns & turns_row & (2 * lane < GROUP)
    token = (group // (ROWS * PER_ROW)).to(tl.int64)[:, None]
    x = _rotated(x, cos_ptr, sin_ptr, pair, token, turns, PAIRS, -1.0 if QUANTIZE else 1.0)
    if QUANTIZE:
        scale = scale_from_amax(amax_bits(x, 1, NATIVE), MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
        x = fake_rounded(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, LIMIT, NATIVE)
    store_rounded(y_ptr + offset, x, inside, MASKED, NATIVE)


def inverse_rope_forward(o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec, n_groups: int) -> Tensor:
    """``o`` [..., H, D] turned back by cos, sin [..., P] and rounded: [..., n_groups, H/n_groups * D], contiguous."""
    columns = o.shape[-2] // n_groups * o.shape[-1]
    y = torch.empty((*o.shape[:-2], n_groups, columns), dtype=o.dtype, device=o.device)
    _launch("rope", o, cos, sin, y, spec, n_groups)
    return y


def inverse_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient [..., H, D] rotated forward, contiguous, in its dtype."""
    y = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _launch("rope_backward", grad, cos, sin, y, QuantSpec(block=(1, 128)), 1)
    return y


def _launch(kernel: str, x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, spec: QuantSpec, n_groups: int) -> None:
    head = x.shape[-1]
    columns = x.shape[-2] // n_groups * head
    group = min(spec.block[1], columns)
    per_row = -(-columns // group)
    width = triton.next_power_of_2(group)
    tile = tile_of(kernel, width)
    groups = y.numel() // columns * per_row
    flat = width == group and columns % group == 0
    _rope_kernel[(-(-groups // tile),)](
        x.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        y,
        groups,
        columns,
        QUANTIZE=kernel == "rope",
        ALIGNED=head % group == 0 and width == group,
        HEAD=head,
        PAIRS=cos.shape[-1],
        ROWS=n_groups,
        PER_ROW=per_row,
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        FLAT=flat,
        MASKED=not flat or groups % tile != 0,
        num_warps=SHAPES[kernel].warps,
        enable_fp_fusion=False,
        **rounding_arguments(spec, torch.float32),
    )
