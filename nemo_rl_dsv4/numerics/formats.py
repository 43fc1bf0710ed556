"""The number formats of an FP8/FP4 rollout: limits, every code point, encode and decode.

Four formats matter. Three hold values: ``e4m3fn`` (NVIDIA, MI355X), ``e4m3fnuz`` (MI300X) and ``e2m1`` (FP4). One holds
scales: E8M0, where byte ``b`` is ``2**(b - 127)`` and 255 is NaN. All rounding to a value format is round-to-nearest,
ties to even, subnormals included; torch's own FP8 casts do that on every device, FP4 is done here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError

EXPONENT_MASK = 0x7F800000
MANTISSA_MASK = 0x007FFFFF
MIN_SCALE = 2.0**-126  # smallest normal float32, E8M0 byte 1: GPUs may flush anything below


class NumericsError(UserError, ValueError):
    """A value that a format cannot hold, or a quantization setting that does not exist."""


@dataclass(frozen=True)
class FloatFormat:
    """Limits of one value format.

    ``max_value`` is the largest finite value, ``min_subnormal`` the smallest positive one, ``mantissa_bits`` the stored
    bits. ``nan_codes`` lists the bytes that decode to NaN. ``dtype`` is torch's type, None where torch has none.
    """

    name: str
    max_value: float
    min_normal: float
    min_subnormal: float
    mantissa_bits: int
    nan_codes: tuple[int, ...]
    dtype: torch.dtype | None


FORMATS: dict[str, FloatFormat] = {
    "e4m3fn": FloatFormat("e4m3fn", 448.0, 2.0**-6, 2.0**-9, 3, (0x7F, 0xFF), torch.float8_e4m3fn),
    "e4m3fnuz": FloatFormat("e4m3fnuz", 240.0, 2.0**-7, 2.0**-10, 3, (0x80,), torch.float8_e4m3fnuz),
    "e2m1": FloatFormat("e2m1", 6.0, 1.0, 0.5, 1, (), None),
}

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_CODE_OF_TWICE = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)  # index 2*|value|; odd holes are never reached


def round_to_e2m1(values: Tensor) -> Tensor:
    """Rounds float32 ``values`` to the nearest e2m1 value, ties to even, saturating at +-6. NaN stays NaN.

    Adding and subtracting 1.5 * 2^22 * 2^e leaves one mantissa bit of a number with exponent e: the float32 adder does
    the rounding. Exponents under 0 share the quantum 0.5 of the subnormals.
    """
    clamped = values.clamp(-6.0, 6.0)
    power = (clamped.contiguous().view(torch.int32) & EXPONENT_MASK).view(torch.float32).clamp_min_(1.0)
    power = power * (1.5 * 2.0**22)
    return ((clamped + power) - power).copysign(clamped)


def encode(values: Tensor, fmt: str) -> Tensor:
    """Nearest code of each float32 value, as uint8 of the same shape (e2m1: one code a byte, 0..15).

    FP8 input beyond the largest value becomes NaN or the largest value as torch's cast decides, so scale first; e2m1
    saturates at 6 and, having no NaN, raises NumericsError on one.
    """
    if fmt == "e2m1":
        rounded = round_to_e2m1(values.float())
        if bool(rounded.isnan().any()):
            raise NumericsError(
                "e2m1 has no NaN: found NaN among the values to encode; check the tensor before quantizing"
            )
        table = torch.tensor(_E2M1_CODE_OF_TWICE, dtype=torch.uint8, device=values.device)
        magnitude = table[(rounded.abs() * 2).to(torch.int32)]
        return magnitude | (rounded.signbit().to(torch.uint8) << 3)
    dtype = format_of(fmt).dtype
    assert dtype is not None
    return values.float().to(dtype).view(torch.uint8)


def decode(codes: Tensor, fmt: str) -> Tensor:
    """Float32 value of each uint8 code (inverse of :func:`encode`); NaN codes give NaN."""
    if fmt == "e2m1":
        values = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device=codes.device)
        values = torch.cat([values, -values])
        return values[codes.to(torch.int32)]
    dtype = format_of(fmt).dtype
    assert dtype is not None
    return codes.view(dtype).to(torch.float32)


def format_of(name: str) -> FloatFormat:
    """The format called ``name``; NumericsError names the valid ones otherwise."""
    try:
        return FORMATS[name]
    except KeyError:
        raise NumericsError(f"unknown number format {name!r}; valid: {', '.join(FORMATS)}") from None


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs e2m1 codes 0..15 (uint8 [..., n], n even) two a byte, low nibble first: uint8 [..., n/2]."""
    if codes.shape[-1] % 2:
        raise NumericsError(f"e2m1 packs two codes a byte: last dim is {codes.shape[-1]}, it must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_e2m1`: uint8 or int8 [..., n/2] to codes uint8 [..., n]."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def is_power_of_two(scale: Tensor) -> Tensor:
    """Bool per element: positive, finite, and 2^-127 (E8M0 byte 0) or a normal float32 with a zero mantissa."""
    bits = scale.float().contiguous().view(torch.int32)
    normal = (bits >= 0x00800000) & (bits < EXPONENT_MASK) & ((bits & MANTISSA_MASK) == 0)
    return normal | (bits == 0x00400000)


def scale_to_e8m0_bytes(scale: Tensor, *, name: str = "scale") -> Tensor:
    """E8M0 bytes (uint8, same shape) of float32 power-of-two scales.

    Raises NumericsError that names the first element that is not a power of two: a cast would round it to the nearest
    one, drop its sign and so change the weights without a word.
    """
    require_power_of_two(scale, name=name)
    return (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)


def e8m0_bytes_to_scale(data: Tensor) -> Tensor:
    """Float32 scales of E8M0 bytes (uint8, int8 or float8_e8m0fnu, any shape): 2^(byte-127), and NaN for byte 255."""
    byte = data.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    bits = torch.where(byte == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def require_power_of_two(scale: Tensor, *, name: str) -> None:
    """Raises NumericsError naming tensor, index and value of the first scale that is no positive power of two."""
    bad = ~is_power_of_two(scale)
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        value = float(scale[index])
        raise NumericsError(
            f"{name}{list(index)} is {value!r}, not a positive power of two: "
            "quantize with scale='ue8m0' before storing E8M0"
        )
