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
    load_float,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.spec import QuantSpec


@triton.jit
def group_offsets(
    groups,
    columns,
    row_stride,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """(offsets in, offsets out, inside) of this program's groups; the output is contiguous.

    FLAT: rows are contiguous and hold whole groups of a power of two, so that group n begins at n * GROUP.
    """
    first = tl.program_id(0) * TILE
    group = first + tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH)
    inside = (group < groups)[:, None]
    if FLAT:
        read = first.to(tl.int64) * WIDTH + (tl.arange(0, TILE)[:, None] * WIDTH + lane[None, :])
        write = read
    else:
        row = (group // PER_ROW).to(tl.int64)[:, None]
        column = (group % PER_ROW)[:, None] * GROUP + lane[None, :]
        inside = inside & (lane < GROUP)[None, :] & (column < columns)
        read = row * row_stride + column
        write = row * columns + column
    return read, write, inside


@triton.jit
def _fake_quant_groups_kernel(
    x_ptr,
    y_ptr,
    groups,
    columns,
    row_stride,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # GROUP rounded up to a power of two
    TILE: tl.constexpr,  # groups a program
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
    read, write, inside = group_offsets(groups, columns, row_stride, PER_ROW, GROUP, WIDTH, TILE, FLAT)
    x = load_float(x_ptr + read, inside, MASKED)
    scale = scale_from_amax(amax_bits(x, 1, NATIVE), MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    y = fake_rounded(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, LIMIT, NATIVE)
    store_rounded(y_ptr + write, y, inside, MASKED, NATIVE)


def fake_quant_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Rounded values of ``x`` [..., n], contiguous, in its dtype; ``spec.block`` is (1, g) and keeps no channels."""
    columns = x.shape[-1]
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel = "groups" if spec.scale == "ue8m0" else "groups_float"
    group = min(spec.block[1], columns)
    per_row = -(-columns // group)
    width = triton.next_power_of_2(group)
    tile = tile_of(kernel, width)
    groups = rows.shape[0] * per_row
    flat = width == group and columns % group == 0 and rows.stride(0) == columns
    _fake_quant_groups_kernel[(-(-groups // tile),)](
        rows,
        y,
        groups,
        columns,
        rows.stride(0),
        PER_ROW=per_row,
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        FLAT=flat,
        MASKED=not flat or groups % tile != 0,
        num_warps=SHAPES[kernel].warps,
        **rounding_arguments(spec, x.dtype),
    )
    return y


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., n] as [rows, n] with contiguous rows at one stride; copies only where no such view exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or x.shape[-1] == 1 else rows.contiguous()
