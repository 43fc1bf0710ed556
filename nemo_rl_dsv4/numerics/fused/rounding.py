"""The rounding that every kernel shares: scale from amax bits, value to grid, grid value to byte.

Plain integer and float32 arithmetic, no hardware cast: the same code rounds to e4m3fn, e4m3fnuz and e2m1 on any GPU and
under Triton's interpreter (whose own FP8 cast is wrong for values that round up to a power of two, and whose BF16 cast
truncates).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.numerics.scales import float_bits, log2f_carry
from nemo_rl_dsv4.numerics.spec import QuantSpec

# What tl.max uses; tl.max itself cannot be interpreted in a process that imported Triton before asking for it.
_larger = tl.standard._elementwise_max


def rounding_arguments(spec: QuantSpec, x: Tensor) -> dict[str, Any]:
    """Keyword arguments that a kernel passes on to the functions below, from a spec and the tensor it applies to."""
    fmt = format_of(spec.fmt)
    max_bits = float_bits(spec.max_value)
    return {
        "carry_ptr": log2f_carry(spec.max_value, x.device),
        "MAX": spec.max_value,
        "LOWER": 2.0 ** (127 - (max_bits >> 23)),
        "CARRY": 0x7FFFFF - (max_bits & 0x7FFFFF),
        "FLOOR_BITS": float_bits(spec.amax_floor),
        "UE8M0": spec.scale == "ue8m0",
        "LOG2F": spec.scale_rounding == "log2f",
        "MIN_NORMAL": fmt.min_normal,
        "PUSH": 1.5 * 2.0 ** (23 - fmt.mantissa_bits),
        "SIGNED_ZERO": spec.fmt != "e4m3fnuz",
    }


def limit_of(dtype: torch.dtype) -> float:
    """Largest finite number of an output dtype, where dequantized values saturate."""
    return torch.finfo(dtype).max


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Bits of the largest magnitude along an axis. As integers NaN > Inf > numbers: the maximum loses nothing."""
    return tl.reduce(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis, _larger)


@triton.jit
def scale_from_amax(
    bits,
    carry_ptr,
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
    LOG2F: tl.constexpr,
):
    """float32 scale of blocks from the bits of their amax: ``block_scale`` of the reference, operation by operation."""
    floored = tl.maximum(bits, FLOOR_BITS)
    if UE8M0:
        amax = tl.minimum(floored, 0x7F800000).to(tl.float32, bitcast=True)
        lowered = (amax * LOWER).to(tl.int32, bitcast=True)
        power = lowered + (tl.load(carry_ptr + (lowered >> 23)) if LOG2F else CARRY)
        scale_bits = tl.maximum(power & 0x7F800000, 0x00800000)
        scale = scale_bits.to(tl.float32, bitcast=True)
    else:
        amax = floored.to(tl.float32, bitcast=True)
        quotient = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        scale = tl.where(quotient < 1.1754943508222875e-38, 1.1754943508222875e-38, quotient)
    if FLOOR_BITS == 0:
        scale = tl.where(bits == 0, 1.0, scale)
    return scale


@triton.jit
def over_scale(x, scale, UE8M0: tl.constexpr):
    """|x| / scale; the reciprocal of a power of two is exact."""
    magnitude = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if UE8M0:
        return magnitude * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.div_rn(magnitude, scale + tl.full(magnitude.shape, 0.0, tl.float32))


@triton.jit
def to_grid(magnitude, MIN_NORMAL: tl.constexpr, PUSH: tl.constexpr):
    """Nearest value of the format, ties to even, of a magnitude in its range: the float32 adder drops other bits."""
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, MIN_NORMAL) * PUSH
    return (magnitude + power) - power


@triton.jit
def with_sign(magnitude, x):
    """``magnitude`` with the sign of ``x``."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def fake_rounded(
    x,
    scale,
    limit,
    UE8M0: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    """Dequantized float32 value of ``x``, saturated at ``limit``; ``scale`` broadcasts against ``x``."""
    grid = to_grid(over_scale(x, scale, UE8M0), MIN_NORMAL, PUSH)
    value = grid * scale
    value = tl.where(value > limit, limit, value)  # not a minimum, which would drop a NaN
    return with_sign(value, x if SIGNED_ZERO else tl.where(grid == 0.0, 0.0, x))


@triton.jit
def byte_of(grid, x, MIN_NORMAL: tl.constexpr, SIGNED_ZERO: tl.constexpr):
    """FP8 code (int32) of a magnitude on the grid with the sign of ``x``; NaN becomes the format's NaN."""
    normal = (grid.to(tl.int32, bitcast=True) >> 20) - (
        (120 if SIGNED_ZERO else 119) << 3
    )  # 127 minus the format's bias
    code = tl.where(grid >= MIN_NORMAL, normal, (grid * (8.0 / MIN_NORMAL)).to(tl.int32))
    negative = x.to(tl.int32, bitcast=True) < 0
    if SIGNED_ZERO:
        signed = tl.where(negative, code | 0x80, code)
        return tl.where(grid == grid, signed, 0x7F)
    signed = tl.where(negative & (code != 0), code | 0x80, code)
    return tl.where(grid == grid, signed, 0x80)


@triton.jit
def to_bf16_grid(x):
    """float32 value rounded to the nearest BF16, ties to even, still as float32; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def store_rounded(ptr, value, mask):
    """Stores float32 into a float32, BF16 or FP16 tensor, rounding to nearest even on every backend."""
    if ptr.dtype.element_ty == tl.bfloat16:
        value = to_bf16_grid(value)
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)
