"""Decode FP8 and FP4 codes on a CPU by bit operations: the bits of `numerics.dequantize`, several times as fast.

Used where every product code x scale is a normal number of the result's dtype, which holds for power-of-two scales that
are not extreme; `decode` returns None elsewhere, and the caller takes the reference.

FP8: an e4m3 code shifted to the place of the result's exponent is the value times 2^-120, subnormal codes included
(e4m3's bias is 7, that of float32 and bfloat16 127). One multiplication by scale * 2^120 is then exact.
FP4: two bytes (four codes) at a time are looked up in a table.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from nemo_rl_dsv4.numerics.formats import is_power_of_two

_SHIFT = {torch.bfloat16: (torch.int16, 4, -0x7810), torch.float32: (torch.int32, 20, -0x78100000)}
"""Integer dtype of the result's width, the shift, and the mask of sign and 7 code bits (0x87F0...) as signed."""
_FP8_LIFT = 2.0**120
_SMALLEST, _LARGEST = 2.0**-100, 2.0**6
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK = 1 << 19
"""Codes worked on at a time: their buffers stay in a core's cache."""


def decode(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, packed: bool) -> torch.Tensor | None:
    """Return the values [out, in] in `dtype`, or None where this is not exact or not implemented.

    Args:
        codes: CPU; float8_e4m3fn [out, in] without NaN codes, or (`packed`) int8/uint8 [out, in/2].
        scale: float32, one for 128x128 (short last blocks included), or for 32 inputs when packed.
        dtype: float32 or bfloat16.
        packed: FP4 codes, two a byte, low nibble first.
    """
    if codes.is_cuda or dtype not in _SHIFT or not codes.numel():
        return None
    low, high = torch.aminmax(scale)
    if not (float(low) >= _SMALLEST and float(high) <= _LARGEST) or not bool(is_power_of_two(scale).all()):
        return None
    if packed:
        return _decode_fp4(codes, scale, dtype) if codes.shape[1] % 16 == 0 else None
    return _decode_fp8(codes, scale, dtype)


def _decode_fp8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    integer, shift, mask = _SHIFT[dtype]
    rows, cols = codes.shape
    source, out = codes.view(torch.int8), torch.empty(rows, cols, dtype=dtype)
    factors, step = (scale * _FP8_LIFT).to(dtype), max(1, min(128, _CHUNK // cols))
    for block in range(scale.shape[0]):
        factor = factors[block].repeat_interleave(128)[:cols]
        last = min((block + 1) * 128, rows)
        for first in range(block * 128, last, step):
            part = slice(first, min(first + step, last))
            wide = source[part].to(integer)
            torch.mul(wide.bitwise_left_shift_(shift).bitwise_and_(mask).view(dtype), factor, out=out[part])
    return out


def _decode_fp4(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, width = codes.shape
    table = _table(dtype)
    unit = np.uint16 if dtype == torch.bfloat16 else np.uint8
    source = codes.contiguous().view(torch.uint8).numpy().view(unit)
    out = torch.empty(rows, width * 2, dtype=dtype)
    target = out.view(torch.int64).numpy()
    step = max(1, _CHUNK // (2 * width))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        np.take(table, source[part], out=target[part], mode="clip")
        out[part].view(-1, width // 16, 32).mul_(scale[part].to(dtype).unsqueeze(-1))
    return out


@functools.cache
def _table(dtype: torch.dtype) -> np.ndarray:
    """int64 words of the values behind two bytes (bfloat16) or one byte (float32), first code in the low bits."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype)
    count = 4 if dtype == torch.bfloat16 else 2
    index = torch.arange(16**count)
    nibbles = torch.stack([(index >> (4 * i)) & 15 for i in range(count)], dim=1)
    return values[nibbles].contiguous().view(torch.int64).reshape(-1).numpy()
