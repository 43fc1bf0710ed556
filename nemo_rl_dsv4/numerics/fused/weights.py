"""Weights in 2-D blocks: fake quantization, quantization to bytes and scales, dequantization.

Reference: ``reference_quantize``, ``reference_dequantize`` and ``reference_fake_quant`` of the numerics package. A
program takes a block; dequantization, which has no block to measure, a part of one.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.numerics.fused import rounding
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    byte_of,
    fake_rounded,
    load_float,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.spec import QuantSpec
from nemo_rl_dsv4.numerics.tiling import grid_shape


@triton.jit
def _tile(
    block,
    part,
    rows,
    columns,
    blocks_r,
    blocks_c,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
):
    """Offsets into a contiguous [matrices, rows, columns] tensor of WIDE_R rows of a block and which are inside."""
    matrix = (block // (blocks_r * blocks_c)).to(tl.int64)
    first_r = ((block // blocks_c) % blocks_r) * ROWS + part * WIDE_R
    first_c = (block % blocks_c) * COLS
    lane_r = tl.arange(0, WIDE_R)
    lane_c = tl.arange(0, WIDE_C)
    inside_r = (first_r + lane_r < rows) & (part * WIDE_R + lane_r < ROWS)
    inside_c = (first_c + lane_c < columns) & (lane_c < COLS)
    first = (matrix * rows + first_r) * columns + first_c
    offset = first + lane_r.to(tl.int64)[:, None] * columns + lane_c[None, :]
    return offset, inside_r[:, None] & inside_c[None, :]


@triton.jit
def _tiles_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    rows,
    columns,
    blocks_r,
    blocks_c,
    BYTES: tl.constexpr,  # write codes and scales instead of values
    RELOAD: tl.constexpr,  # read the block again once its scale is known: fewer registers, more blocks in flight
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
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
    block = tl.program_id(0)
    offset, inside = _tile(block, 0, rows, columns, blocks_r, blocks_c, ROWS, COLS, WIDE_R, WIDE_C)
    x = load_float(x_ptr + offset, inside, MASKED)
    # First over neighbours, which one thread holds, then over rows: little is left to exchange between threads.
    near: tl.constexpr = 8 if WIDE_C >= 8 else 1
    largest = amax_bits(tl.reshape(x, (WIDE_R, WIDE_C // near, near)), 2, NATIVE).to(tl.float32, bitcast=True)
    largest = amax_bits(largest, 0, NATIVE).to(tl.float32, bitcast=True)
    largest = amax_bits(largest[None, :], 1, NATIVE)
    scale = scale_from_amax(largest, MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    if RELOAD:
        if MASKED:
            x = tl.load(x_ptr + offset, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            x = tl.load(x_ptr + offset, eviction_policy="evict_first").to(tl.float32)
    if BYTES:
        code = byte_of(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
        if MASKED:
            tl.store(y_ptr + offset, code, mask=inside)
        else:
            tl.store(y_ptr + offset, code)
        tl.store(scale_ptr + block + tl.arange(0, 1), scale)
    else:
        y = fake_rounded(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, LIMIT, NATIVE)
        store_rounded(y_ptr + offset, y, inside, MASKED, NATIVE)


@triton.jit
def _dequantize_kernel(
    code_ptr,
    y_ptr,
    scale_ptr,
    rows,
    columns,
    blocks_r,
    blocks_c,
    FN: tl.constexpr,  # e4m3fn, else e4m3fnuz
    PARTS: tl.constexpr,  # programs a block
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_C: tl.constexpr,
    MASKED: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    block = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    offset, inside = _tile(block, part, rows, columns, blocks_r, blocks_c, ROWS, COLS, WIDE_R, WIDE_C)
    code = tl.load(code_ptr + offset, mask=inside, other=0) if MASKED else tl.load(code_ptr + offset)
    scale = tl.load(scale_ptr + block)
    if FN and NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
        value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        # Exponent and mantissa moved up by seven are the same number in float16 but for the bias.
        code = code.to(tl.int32)
        half = ((code & 0x7F) << 7 | (code & 0x80) << 8).to(tl.int16).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * (256.0 if FN else 128.0)
        value = tl.where((code & 0x7F) == 0x7F if FN else code == 0x80, float("nan"), value) * scale
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    store_rounded(y_ptr + offset, value, inside, MASKED, NATIVE)


def _geometry(shape: torch.Size, spec: QuantSpec) -> tuple[int, dict[str, Any]]:
    """Number of blocks, and the kernels' arguments that say where they lie."""
    rows, columns = shape[-2:]
    block_r, block_c = spec.block
    blocks_r, blocks_c = -(-rows // block_r), -(-columns // block_c)
    wide_r, wide_c = triton.next_power_of_2(block_r), triton.next_power_of_2(block_c)
    return shape[:-2].numel() * blocks_r * blocks_c, {
        "rows": rows,
        "columns": columns,
        "blocks_r": blocks_r,
        "blocks_c": blocks_c,
        "ROWS": block_r,
        "COLS": block_c,
        "WIDE_R": wide_r,
        "WIDE_C": wide_c,
        "MASKED": wide_r != block_r or wide_c != block_c or rows % block_r != 0 or columns % block_c != 0,
    }


def _launch_tiles(kernel: str, x: Tensor, y: Tensor, scale: Tensor, spec: QuantSpec) -> None:
    programs, geometry = _geometry(x.shape, spec)
    warps = max(SHAPES[kernel].warps, geometry["WIDE_R"] * geometry["WIDE_C"] // 4096)  # of larger blocks
    _tiles_kernel[(programs,)](
        x,
        y,
        scale,
        BYTES=kernel == "tiles_to_bytes",
        RELOAD=SHAPES[kernel].reload,
        num_warps=warps,
        **geometry,
        **rounding_arguments(spec, x.dtype),
    )


def fake_quant_tiles(x: Tensor, spec: QuantSpec) -> Tensor:
    """Rounded values of ``x`` [..., rows, cols] in its dtype, contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch_tiles("tiles", x, y, y, spec)
    return y


def quantize_tiles(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(FP8 data of x's shape, float32 scales [..., ceil(rows/br), ceil(cols/bc)]) of ``x`` [..., rows, cols]."""
    x = x.contiguous()
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(grid_shape(x.shape, spec.block), dtype=torch.float32, device=x.device)
    _launch_tiles("tiles_to_bytes", x, data, scale, spec)
    dtype = format_of(spec.fmt).dtype
    assert dtype is not None
    return data.view(dtype), scale


def dequantize_tiles(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [..., rows, cols] in ``dtype`` of FP8 ``data`` and its float32 scale grid."""
    data, scale = data.contiguous(), scale.contiguous()
    y = torch.empty(data.shape, dtype=dtype, device=data.device)
    blocks, geometry = _geometry(data.shape, spec)
    geometry["WIDE_R"] = min(geometry["WIDE_R"], tile_of("bytes_to_tiles", geometry["WIDE_C"]))
    parts = -(-spec.block[0] // geometry["WIDE_R"])
    _dequantize_kernel[(blocks * parts,)](
        data.view(torch.uint8),
        y,
        scale,
        FN=spec.fmt == "e4m3fn",
        PARTS=parts,
        LIMIT=torch.finfo(dtype).max,
        NATIVE=rounding.NATIVE,
        num_warps=SHAPES["bytes_to_tiles"].warps,
        **geometry,
    )
    return y
