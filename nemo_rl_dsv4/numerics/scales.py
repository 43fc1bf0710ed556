"""The scale of a block, from its largest magnitude: float amax/max, or UE8M0 by exact bits or as log2f finds it."""

import functools
import math
import struct

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import EXPONENT_MASK, MANTISSA_MASK, MIN_SCALE
from nemo_rl_dsv4.numerics.spec import QuantSpec


def block_scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Float32 scale of each block from its largest magnitude >= 0 (any shape); NaN or Inf in gives NaN or Inf out.

    UE8M0 comes from the bits of amax alone, without the division: max = m * 2^k with a mantissa m below 2, so the
    smallest power of two >= amax/max is 2^(e-k), or twice that where amax's mantissa exceeds m. No scale is zero or
    below 2^-126: GPUs flush smaller ones, and E8M0 byte 0 is refused by some kernels.
    """
    amax = amax.to(torch.float32)
    floored = amax.clamp_min(spec.amax_floor) if spec.amax_floor > 0.0 else amax
    if spec.scale == "ue8m0":
        max_bits = float_bits(spec.max_value)
        lowered = floored * 2.0 ** (127 - (max_bits >> 23))  # first, so that the largest amax does not carry into Inf
        bits = torch.nan_to_num(lowered, nan=math.inf, posinf=math.inf).view(torch.int32)
        if spec.scale_rounding == "log2f":
            power = bits + log2f_carry(spec.max_value, bits.device)[bits >> 23]
        else:
            power = bits + (MANTISSA_MASK - (max_bits & MANTISSA_MASK))
        scale = power.bitwise_and_(EXPONENT_MASK).view(torch.float32)
    else:
        # A tensor divisor: CUDA turns division by a Python number into multiplication by its rounded reciprocal.
        scale = floored / torch.full((), spec.max_value, dtype=torch.float32, device=amax.device)
    if spec.amax_floor >= 2.0**-100:
        return scale
    scale = scale.clamp_min_(MIN_SCALE)
    return scale if spec.amax_floor > 0.0 else scale.masked_fill_(amax == 0.0, 1.0)


def float_bits(value: float) -> int:
    """The float32 nearest to ``value`` as a signed 32-bit integer."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _carry_table(max_value: float) -> list[int]:
    """Per biased exponent of amax * 2^-k: what to add to its bits to get the scale's exponent under the log2f rule.

    The exact rule adds the distance from max's mantissa to a full one. log2f raises the threshold by the number of ulp
    above max * 2^e for which log2f(amax/max) still rounds to e.

    log2(2^e * (1 + d)) = e + d / ln 2 rounds to e while the excess is under half the float32 spacing beyond e:
    2^(floor(log2|e|) - 24), or that of |e| - 1/2 towards zero. At e = 0 every excess is representable. d counts in ulp
    of the rounded quotient; one ulp of amax is 1/mantissa(max) of those.
    """
    mantissa = math.frexp(max_value)[0]
    exact = MANTISSA_MASK - (float_bits(max_value) & MANTISSA_MASK)
    table = []
    for biased in range(256):
        exponent = biased - 127
        steps = exponent if exponent > 0 else -exponent - 0.5
        half = 0.0 if exponent == 0 else 2.0 ** (math.floor(math.log2(steps)) - 24)
        slack = math.floor((math.floor(half * math.log(2.0) * 2.0**23) + 0.5) * 2.0 * mantissa)
        table.append(exact - slack)
    return table


_CARRY = {largest: torch.tensor(_carry_table(largest), dtype=torch.int32) for largest in (448.0, 240.0, 224.0, 6.0)}


def log2f_carry(max_value: float, device: torch.device) -> Tensor:
    """int32 [256] table of the log2f rule on ``device``, copied there once."""
    if torch.compiler.is_compiling():
        return _CARRY[max_value].to(device)
    return _carry_on(max_value, device)


@functools.cache
def _carry_on(max_value: float, device: torch.device) -> Tensor:
    return _CARRY[max_value].to(device)
