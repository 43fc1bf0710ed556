"""The formats once more in scalar Python, from their definitions: the golden bytes of the tests come from here."""

import math

MAX = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e2m1": 6.0}
_BIAS = {"e4m3fn": 7, "e4m3fnuz": 8, "e2m1": 1}
_MANTISSA = {"e4m3fn": 3, "e4m3fnuz": 3, "e2m1": 1}
_SIGN = {"e4m3fn": 0x80, "e4m3fnuz": 0x80, "e2m1": 0x8}


def decode(code: int, fmt: str) -> float:
    """Value of one code, NaN included."""
    sign, bits = _SIGN[fmt], _MANTISSA[fmt]
    if fmt == "e4m3fnuz" and code == 0x80:
        return math.nan
    if fmt == "e4m3fn" and code & 0x7F == 0x7F:
        return math.nan
    exponent, mantissa = (code % sign) >> bits, (code % sign) & ((1 << bits) - 1)
    lead, power = (1, exponent) if exponent else (0, 1)
    magnitude = (lead + mantissa / (1 << bits)) * 2.0 ** (power - _BIAS[fmt])
    return -magnitude if code >= sign else magnitude


def encode(value: float, fmt: str) -> int:
    """Code nearest to a value within the range, ties to the even code; a zero keeps its sign where the format can."""
    sign = _SIGN[fmt]
    negative = math.copysign(1.0, value) < 0
    codes = [c for c in range(sign) if not math.isnan(decode(c, fmt)) and decode(c, fmt) <= MAX[fmt]]
    best = min(codes, key=lambda c: (abs(decode(c, fmt) - abs(value)), c % 2))
    if negative and (best or fmt != "e4m3fnuz"):
        return best + sign
    return best


def power_of_two_scale(amax: float, largest: float) -> float:
    """Smallest power of two s with amax / s <= largest, by counting up and down in exact arithmetic."""
    scale = 1.0
    while amax > largest * scale:
        scale *= 2.0
    while amax <= largest * scale / 2.0:
        scale /= 2.0
    return scale
