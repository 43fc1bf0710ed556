"""Activations in groups along the last dim as FP8 bytes and scales, and back: the operands of FP8 GEMMs.

Reference: ``reference_quantize`` and ``reference_dequantize`` with block (1, g), whole groups and no kept channels.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.numerics.fused import rounding
from nemo_rl_dsv4.numerics.fused.groups import as_rows
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    byte_of,
    load_float,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.spec import QuantSpec


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    groups,
    row_stride,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
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
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, GROUP)
    row = (group // PER_ROW).to(tl.int64)
    column = (group % PER_ROW) * GROUP
    inside = group < groups
    read = (row * row_stride + column)[:, None] + lane[None, :]
    x = load_float(x_ptr + read, inside[:, None], MASKED)
    scale = scale_from_amax(amax_bits(x, 1, NATIVE), MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    code = byte_of(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
    write = (group.to(tl.int64) * GROUP)[:, None] + lane[None, :]
    if MASKED:
        tl.store(code_ptr + write, code, mask=inside[:, None])
        tl.store(scale_ptr + group, scale, mask=inside)
    else:
        tl.store(code_ptr + write, code)
        tl.store(scale_ptr + group, scale)


@triton.jit
def _dequantize_kernel(
    code_ptr,
    scale_ptr,
    y_ptr,
    groups,
    FN: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, GROUP)
    inside = group < groups
    offset = (group.to(tl.int64) * GROUP)[:, None] + lane[None, :]
    if MASKED:
        code = tl.load(code_ptr + offset, mask=inside[:, None], other=0)
        scale = tl.load(scale_ptr + group, mask=inside, other=1.0)
    else:
        code = tl.load(code_ptr + offset)
        scale = tl.load(scale_ptr + group)
    if FN and NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        code = code.to(tl.int32)
        half = ((code & 0x7F) << 7 | (code & 0x80) << 8).to(tl.int16).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * (256.0 if FN else 128.0)
        value = tl.where((code & 0x7F) == 0x7F if FN else code == 0x80, float("nan"), value) * scale[:, None]
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    store_rounded(y_ptr + offset, value, inside[:, None], MASKED, NATIVE)


def covers(shape: torch.Size, spec: QuantSpec) -> bool:
    """Whether rows are whole groups of a power of two of channels and codes are bytes."""
    group = spec.block[1]
    power = group & (group - 1) == 0 and 16 <= group <= 1024
    return spec.block[0] == 1 and power and shape[-1] % group == 0 and spec.keep_last == 0 and spec.fmt != "e2m1"


def quantize_groups(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(FP8 data of x's shape, float32 scales [..., n/g]), contiguous, of ``x`` [..., n]."""
    rows = as_rows(x)
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // spec.block[1]), dtype=torch.float32, device=x.device)
    groups, tile = scale.numel(), tile_of("groups_to_bytes", spec.block[1])
    _quantize_kernel[(-(-groups // tile),)](
        rows,
        data,
        scale,
        groups,
        rows.stride(0),
        PER_ROW=scale.shape[-1],
        GROUP=spec.block[1],
        TILE=tile,
        MASKED=groups % tile != 0,
        num_warps=SHAPES["groups_to_bytes"].warps,
        **rounding_arguments(spec, x.dtype),
    )
    dtype = format_of(spec.fmt).dtype
    assert dtype is not None
    return data.view(dtype), scale


def dequantize_groups(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [..., n] in ``dtype`` of FP8 ``data`` and its float32 scales [..., n/g]."""
    data, scale = data.contiguous(), scale.contiguous()
    y = torch.empty(data.shape, dtype=dtype, device=data.device)
    groups, tile = scale.numel(), tile_of("bytes_to_groups", spec.block[1])
    _dequantize_kernel[(-(-groups // tile),)](
        data.view(torch.uint8),
        scale,
        y,
        groups,
        FN=spec.fmt == "e4m3fn",
        GROUP=spec.block[1],
        TILE=tile,
        MASKED=groups % tile != 0,
        LIMIT=torch.finfo(dtype).max,
        NATIVE=rounding.NATIVE,
        num_warps=SHAPES["bytes_to_groups"].warps,
    )
    return y
