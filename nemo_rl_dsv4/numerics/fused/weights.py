"""Weights in 2-D blocks: fake quantization, quantization to bytes and scales, dequantization; a program a block.

Reference: ``reference_quantize``, ``reference_dequantize`` and ``reference_fake_quant`` of the numerics package.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    byte_of,
    fake_rounded,
    limit_of,
    over_scale,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
    to_grid,
)
from nemo_rl_dsv4.numerics.spec import QuantSpec
from nemo_rl_dsv4.numerics.tiling import grid_shape

NUM_WARPS = 8


@triton.jit
def _tile(
    pid,
    rows,
    columns,
    blocks_r,
    blocks_c,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
):
    """Offsets into a contiguous [matrices, rows, columns] tensor of block ``pid`` and which of them are inside."""
    matrix = (pid // (blocks_r * blocks_c)).to(tl.int64)
    block_r = (pid // blocks_c) % blocks_r
    lane_r = tl.arange(0, WIDE_R)
    lane_c = tl.arange(0, WIDE_C)
    row = block_r * ROWS + lane_r
    column = (pid % blocks_c) * COLS + lane_c
    inside_r = (row < rows) & (lane_r < ROWS)
    inside_c = (column < columns) & (lane_c < COLS)
    offset = (matrix * rows + row.to(tl.int64)[:, None]) * columns + column[None, :]
    return offset, inside_r[:, None] & inside_c[None, :]


@triton.jit
def _tiles_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    carry_ptr,
    rows,
    columns,
    blocks_r,
    blocks_c,
    limit,
    BYTES: tl.constexpr,  # write codes and scales instead of values
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
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
    pid = tl.program_id(0)
    offset, inside = _tile(pid, rows, columns, blocks_r, blocks_c, ROWS, COLS, WIDE_R, WIDE_C)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    largest = amax_bits(amax_bits(x, 1).to(tl.float32, bitcast=True)[None, :], 1)
    scale = scale_from_amax(largest, carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F)
    if BYTES:
        grid = to_grid(over_scale(x, scale[:, None], UE8M0), MIN_NORMAL, PUSH)
        tl.store(y_ptr + offset, byte_of(grid, x, MIN_NORMAL, SIGNED_ZERO).to(tl.uint8), mask=inside)
        tl.store(scale_ptr + pid + tl.arange(0, 1), scale)
    else:
        y = fake_rounded(x, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
        store_rounded(y_ptr + offset, y, inside)


@triton.jit
def _dequantize_kernel(
    code_ptr,
    y_ptr,
    scale_ptr,
    rows,
    columns,
    blocks_r,
    blocks_c,
    limit,
    FN: tl.constexpr,  # e4m3fn, else e4m3fnuz
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
):
    pid = tl.program_id(0)
    offset, inside = _tile(pid, rows, columns, blocks_r, blocks_c, ROWS, COLS, WIDE_R, WIDE_C)
    code = tl.load(code_ptr + offset, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + pid)
    # Exponent and mantissa moved up by seven are the same number in float16 but for the bias.
    half = ((code & 0x7F) << 7 | (code & 0x80) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    if FN:
        value = half.to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = half.to(tl.float32) * 128.0
        value = tl.where(code == 0x80, float("nan"), value)
    value = value * scale
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    store_rounded(y_ptr + offset, value, inside)


def _geometry(shape: torch.Size, spec: QuantSpec) -> tuple[int, dict[str, Any]]:
    blocks_r, blocks_c = grid_shape(shape, spec.block)[-2:]
    matrices = shape[:-2].numel()
    return matrices * blocks_r * blocks_c, {
        "rows": shape[-2],
        "columns": shape[-1],
        "blocks_r": blocks_r,
        "blocks_c": blocks_c,
        "ROWS": spec.block[0],
        "COLS": spec.block[1],
        "WIDE_R": triton.next_power_of_2(spec.block[0]),
        "WIDE_C": triton.next_power_of_2(spec.block[1]),
        "num_warps": NUM_WARPS,
    }


def fake_quant_tiles(x: Tensor, spec: QuantSpec) -> Tensor:
    """Rounded values of ``x`` [..., rows, cols] in its dtype, contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x)
    programs, geometry = _geometry(x.shape, spec)
    arguments = rounding_arguments(spec, x)
    _tiles_kernel[(programs,)](x, y, y, limit=limit_of(x.dtype), BYTES=False, **geometry, **arguments)
    return y


def quantize_tiles(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(FP8 data of x's shape, float32 scales [..., ceil(rows/br), ceil(cols/bc)]) of ``x`` [..., rows, cols]."""
    x = x.contiguous()
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(grid_shape(x.shape, spec.block), dtype=torch.float32, device=x.device)
    programs, geometry = _geometry(x.shape, spec)
    _tiles_kernel[(programs,)](x, data, scale, limit=0.0, BYTES=True, **geometry, **rounding_arguments(spec, x))
    dtype = format_of(spec.fmt).dtype
    assert dtype is not None
    return data.view(dtype), scale


def dequantize_tiles(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [..., rows, cols] in ``dtype`` of FP8 ``data`` and its float32 scale grid."""
    data, scale = data.contiguous(), scale.contiguous()
    y = torch.empty(data.shape, dtype=dtype, device=data.device)
    programs, geometry = _geometry(data.shape, spec)
    _dequantize_kernel[(programs,)](
        data.view(torch.uint8), y, scale, limit=limit_of(dtype), FN=spec.fmt == "e4m3fn", **geometry
    )
    return y
