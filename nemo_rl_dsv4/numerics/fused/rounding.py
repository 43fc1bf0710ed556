"""The rounding that every kernel shares: scale from amax bits, value to grid, grid value to byte.

Two ways to the same bits. On an NVIDIA GPU with FP8 (``NATIVE``) its own conversions round, which is the fewest
instructions. Everywhere else plain integer and float32 arithmetic does, as it does for e4m3fnuz and e2m1: the same code
on any GPU and under Triton's interpreter (whose FP8 cast is wrong for values that round up to a power of two, and whose
BF16 cast truncates).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.numerics.scales import float_bits
from nemo_rl_dsv4.numerics.spec import QuantSpec

# What tl.max uses; tl.max itself cannot be interpreted in a process that imported Triton before asking for it.
_larger = tl.standard._elementwise_max


def _has_fp8_conversions() -> bool:
    if knobs.runtime.interpret or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return all(torch.cuda.get_device_capability(device) >= (8, 9) for device in range(torch.cuda.device_count()))


NATIVE = _has_fp8_conversions()


def _of_max(max_value: float) -> dict[str, Any]:
    bits = float_bits(max_value)
    return {
        "MAX": max_value,
        "LOWER": 2.0 ** (127 - (bits >> 23)),
        "CARRY": 0x7FFFFF - (bits & 0x7FFFFF),
        "MANTISSA": int(math.frexp(max_value)[0] * 16),
    }


_OF_MAX = {max_value: _of_max(max_value) for max_value in (448.0, 240.0, 224.0, 6.0)}


def rounding_arguments(spec: QuantSpec, dtype: torch.dtype | None) -> dict[str, Any]:
    """Keyword arguments that a kernel passes on to the functions below; values saturate at ``dtype``'s limit.

    dtype None: the caller knows that none can come near a limit.
    """
    fmt = format_of(spec.fmt)
    arguments = {
        **_OF_MAX[spec.max_value],
        "FLOOR_BITS": float_bits(spec.amax_floor),
        "UE8M0": spec.scale == "ue8m0",
        "MIN_NORMAL": fmt.min_normal,
        "PUSH": 1.5 * 2.0 ** (23 - fmt.mantissa_bits),
        "SIGNED_ZERO": spec.fmt != "e4m3fnuz",
        "LIMIT": math.inf if dtype is None else torch.finfo(dtype).max,
        "NATIVE": NATIVE,
    }
    if spec.scale_rounding != "log2f":
        arguments["MANTISSA"] = 0
    return arguments


@triton.jit
def _larger_or_nan(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x, axis: tl.constexpr, NATIVE: tl.constexpr):
    """Bits of the largest magnitude along an axis. As integers NaN > Inf > numbers: the maximum loses nothing."""
    if NATIVE:
        bits = tl.reduce(tl.abs(x), axis, _larger_or_nan).to(tl.int32, bitcast=True)
    else:
        bits = tl.reduce(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis, _larger)
    return bits


@triton.jit
def scale_from_amax(
    bits,
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    MANTISSA: tl.constexpr,  # sixteenths of MAX over the next power of two under the log2f rule, else 0
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """float32 scale of blocks from the bits of their amax: ``block_scale`` of the reference, operation by operation."""
    floored = tl.maximum(bits, FLOOR_BITS)
    if UE8M0:
        amax = tl.minimum(floored, 0x7F800000).to(tl.float32, bitcast=True)
        lowered = (amax * LOWER).to(tl.int32, bitcast=True)
        power = lowered + CARRY
        if MANTISSA:
            # The reference's table of slack by exponent e: half a spacing of log2f at e is 2^(octave - 25) octaves,
            # floor(ln 2 * 2^(octave - 1)) = 22 >> (6 - octave) ulp, where octave is floor(log2 |e|).
            exponent = (lowered >> 23) - 127
            steps = ((exponent ^ (exponent >> 31)) & 127) | 1
            beyond = 22 >> (133 - (steps.to(tl.float32).to(tl.int32, bitcast=True) >> 23))
            power -= ((2 * beyond + 1) * MANTISSA) >> 4
        scale_bits = tl.maximum(power & 0x7F800000, 0x00800000)
        scale = scale_bits.to(tl.float32, bitcast=True)
    else:
        amax = floored.to(tl.float32, bitcast=True)
        divided = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        scale = tl.where(divided < 1.1754943508222875e-38, 1.1754943508222875e-38, divided)
    if FLOOR_BITS == 0:
        scale = tl.where(bits == 0, 1.0, scale)
    return scale


@triton.jit
def reciprocal(x, bounded):
    """1 / ``x``, rounded once, for 2^-126 <= x < 2^126, and 0 for Inf; NVIDIA only. The steps of ``rcp.rn``.

    ``bounded`` is min(x, 2^126). Negation is written as a product, which folds into the multiply-add.
    """
    near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(tl.fma(bounded * -1.0, near, 1.0), near, near)


@triton.jit
def quotient(x, divisor, inverse):
    """Finite ``x`` / ``divisor``, rounded once: the steps of ``div.rn`` without its branch; NVIDIA only.

    ``inverse`` is reciprocal(divisor). Nothing may be so small that the remainder x * 2^-24 underflows, unless the
    division is exact or only its rounding to zero counts.
    """
    first = x * inverse
    second = tl.fma(tl.fma(first * -1.0, divisor, x), inverse, first)
    third = tl.fma(tl.fma(second * -1.0, divisor, x), inverse, second)
    return with_sign(third, x)


@triton.jit
def over_scale(x, scale, UE8M0: tl.constexpr, NATIVE: tl.constexpr):
    """x / scale; the reciprocal of a power of two is exact, and zero for the scale of a block with Inf."""
    bits = scale.to(tl.int32, bitcast=True)
    if UE8M0:
        scaled = x * tl.maximum(0x7F000000 - bits, 0).to(tl.float32, bitcast=True)
    elif NATIVE:
        # By the scale's exponent first, which is exact but for quotients that round to zero, then by its mantissa.
        power = tl.maximum(0x7F000000 - (bits & 0x7F800000), 0).to(tl.float32, bitcast=True)
        mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        scaled = quotient(x * power, mantissa, reciprocal(mantissa, mantissa))
    else:
        scaled = tl.div_rn(x, scale + tl.full(x.shape, 0.0, tl.float32))
    return scaled


@triton.jit
def to_grid(x, MIN_NORMAL: tl.constexpr, PUSH: tl.constexpr):
    """Nearest value of the format, ties to even, of |x| in its range: the float32 adder drops other bits."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    power = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), MIN_NORMAL) * PUSH
    return (magnitude + power) - power


@triton.jit
def with_sign(value, x):
    """``value`` with the sign of ``x``."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def fake_rounded(
    x,
    scale,
    MAX: tl.constexpr,
    UE8M0: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Dequantized float32 value of ``x``, saturated at LIMIT; ``scale`` broadcasts against ``x``."""
    scaled = over_scale(x, scale, UE8M0, NATIVE)
    if NATIVE and MAX == 448.0:
        value = scaled.to(tl.float8e4nv).to(tl.float32) * scale
        if float("inf") != LIMIT:
            value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        grid = to_grid(scaled, MIN_NORMAL, PUSH)
        value = grid * scale
        value = tl.where(value > LIMIT, LIMIT, value)  # not a minimum, which would drop a NaN
        value = with_sign(value, x if SIGNED_ZERO else tl.where(grid == 0.0, 0.0, x))
    return value


@triton.jit
def byte_of(
    x,
    scale,
    MAX: tl.constexpr,
    UE8M0: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """FP8 code (uint8) of ``x`` / ``scale``; NaN becomes the format's NaN."""
    scaled = over_scale(x, scale, UE8M0, NATIVE)
    if NATIVE and MAX == 448.0:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        grid = to_grid(scaled, MIN_NORMAL, PUSH)
        normal = (grid.to(tl.int32, bitcast=True) >> 20) - (
            (120 if SIGNED_ZERO else 119) << 3
        )  # 127 minus the format's bias
        wide = tl.where(grid >= MIN_NORMAL, normal, (grid * (8.0 / MIN_NORMAL)).to(tl.int32))
        negative = x.to(tl.int32, bitcast=True) < 0
        if not SIGNED_ZERO:
            negative = negative & (wide != 0)
        wide = tl.where(negative, wide | 0x80, wide)
        code = tl.where(grid == grid, wide, 0x7F if SIGNED_ZERO else 0x80).to(tl.uint8)
    return code


# Both ways in four instructions for two values; a conversion for each value alone is a slow one. The text has no line
# breaks: torch.compile copies it between double quotes into the module it generates.
_BF16_PAIR = tl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)


@triton.jit
def to_bf16_grid(x, NATIVE: tl.constexpr):
    """float32 value rounded to the nearest BF16, ties to even, still as float32; NaN stays."""
    if NATIVE:
        rounded = tl.inline_asm_elementwise(_BF16_PAIR, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        rounded = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return rounded


@triton.jit
def load_float(ptr, inside, MASKED: tl.constexpr):
    """float32 values at ``ptr``, zero outside."""
    x = tl.load(ptr, mask=inside, other=0.0) if MASKED else tl.load(ptr)
    return x.to(tl.float32)


@triton.jit
def store_rounded(ptr, value, inside, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """Stores float32 into a float32, BF16 or FP16 tensor, rounding to nearest even on every backend."""
    if ptr.dtype.element_ty == tl.bfloat16 and not NATIVE:
        value = to_bf16_grid(value, NATIVE)
    value = value.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr, value, mask=inside)
    else:
        tl.store(ptr, value)
