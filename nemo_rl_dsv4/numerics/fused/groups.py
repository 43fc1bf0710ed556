"""Activation fake quantization in groups along the last dim: one read, one write.

Reference: :func:`nemo_rl_dsv4.numerics.fake_quant.reference_fake_quant` with block (1, g) and no kept channels.
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

TILE_ELEMENTS = 8192  # elements a program
NUM_WARPS = 8


@triton.jit
def _fake_quant_groups_kernel(
    x_ptr,
    y_ptr,
    carry_ptr,
    groups,
    groups_per_row,
    columns,
    row_stride,
    limit,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # GROUP rounded up to a power of two
    TILE: tl.constexpr,  # groups a program
    WHOLE: tl.constexpr,  # every group is WIDTH wide
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
    row = (group // groups_per_row).to(tl.int64)
    column = (group % groups_per_row)[:, None] * GROUP + lane[None, :]
    inside = (group < groups)[:, None]
    if not WHOLE:
        inside = inside & (lane < GROUP)[None, :] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_from_amax(amax_bits(x, 1), carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F)
    y = fake_rounded(x, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
    store_rounded(y_ptr + row[:, None] * columns + column, y, inside)


def fake_quant_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Rounded values of ``x`` [..., n], contiguous, in its dtype; ``spec.block`` is (1, g) and keeps no channels."""
    columns = x.shape[-1]
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    group = min(spec.block[1], columns)
    per_row = triton.cdiv(columns, group)
    width = triton.next_power_of_2(group)
    tile = max(1, TILE_ELEMENTS // width)
    groups = rows.shape[0] * per_row
    _fake_quant_groups_kernel[(triton.cdiv(groups, tile),)](
        rows,
        y,
        groups=groups,
        groups_per_row=per_row,
        columns=columns,
        row_stride=rows.stride(0),
        limit=limit_of(x.dtype),
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        WHOLE=columns % width == 0 and width == group,
        num_warps=NUM_WARPS,
        **rounding_arguments(spec, x),
    )
    return y


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., n] as [rows, n] with contiguous rows at one stride; copies only where no such view exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or x.shape[-1] == 1 else rows.contiguous()
