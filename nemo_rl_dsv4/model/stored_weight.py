"""Decode the quantized weights a checkpoint or a refit stream carries: codes, scales, and the checks on both.

FP8 weights are [out, in] with one scale for 128x128 (short last blocks included); FP4 weights are packed two a byte,
[out, in/2], with one scale for 32 inputs. A scale is float32, or an E8M0 byte under any of its dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model import exact_decode
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize
from nemo_rl_dsv4.numerics.formats import FORMATS, MIN_SCALE, decode, e8m0_bytes_to_scale, is_power_of_two, unpack_e2m1

FP8_SPEC = QuantSpec(fmt="e4m3fn", block=(128, 128), scale="ue8m0")
FP4_SPEC = QuantSpec(fmt="e2m1", block=(1, 32), scale="ue8m0")
_SPEC_OF_DTYPE = {
    torch.float8_e4m3fn: FP8_SPEC,
    torch.float8_e4m3fnuz: QuantSpec(fmt="e4m3fnuz", block=(128, 128), scale="ue8m0"),
    torch.int8: FP4_SPEC,
    torch.uint8: FP4_SPEC,
}
_BYTE_SCALES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
_FLOAT_SCALES = (torch.float32, torch.bfloat16)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a weight of this dtype holds codes that mean nothing without a scale."""
    return dtype in _SPEC_OF_DTYPE


def scale_name(weight_name: str) -> str:
    """Official name of a weight's scale: `.scale` beside `.weight`."""
    return weight_name.removesuffix(".weight") + ".scale"


def scale_rows(dtype: torch.dtype) -> int:
    """Rows of a quantized weight of this dtype that share a row of scales."""
    return _SPEC_OF_DTYPE[dtype].block[0]


def scale_grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scale of a [rows, cols] weight: one entry a block, short last blocks included."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def decode_scale(scale: torch.Tensor, *, name: str, power_of_two: bool = True) -> torch.Tensor:
    """Return float32 scales, decoding E8M0 bytes as 2^(byte - 127) and never reading a byte as a number.

    Raises:
        UserError: another dtype; an element that is NaN, infinite, zero, negative, or (`power_of_two`) no power of two.
    """
    if scale.dtype in _BYTE_SCALES:
        values = e8m0_bytes_to_scale(scale)
    elif scale.dtype in _FLOAT_SCALES:
        values = scale.float()
    else:
        raise UserError(f"{name}: scale dtype is {scale.dtype}; wanted float32 or E8M0 bytes")
    # Under 2^-126 a scale reads as zero in part of the engines (E8M0 byte 0), and nothing writes one on purpose.
    good = values.isfinite() & (values >= MIN_SCALE)
    if power_of_two:
        good &= is_power_of_two(values)
    if not bool(good.all()):
        index = (~good).nonzero()[0].tolist()
        wanted = "a power of two (scale_fmt is ue8m0)" if power_of_two else "a finite number"
        raise UserError(f"{name}{index} is {float(values[tuple(index)])!r}; wanted {wanted} of at least 2^-126")
    return values


def decode_weight(
    name: str, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = True
) -> torch.Tensor:
    """Return the values [out, in] of an FP8 or packed FP4 weight in `dtype`.

    Args:
        name: official name of the weight, for messages.
        data: float8_e4m3fn or float8_e4m3fnuz [out, in], or int8/uint8 [out, in/2] with two FP4 codes a byte.
        scale: float32, bfloat16, or E8M0 bytes, one a block: [out/128, in/128] or [out, in/32], rounded up.
        dtype: float32, bfloat16 or float16.
        power_of_two: refuse scales that are not powers of two.

    Raises:
        UserError: the grid does not fit the weight, a scale is not valid, or a code is NaN.
    """
    spec = _SPEC_OF_DTYPE[data.dtype]
    shape = torch.Size((data.shape[0], data.shape[1] * 2)) if spec.fmt == "e2m1" else data.shape
    grid = scale_grid(shape, spec.block)
    if tuple(scale.shape) != grid:
        raise UserError(
            f"{name}: scale is {list(scale.shape)}; wanted {list(grid)}, one for {spec.block[0]}x{spec.block[1]} of "
            f"{list(shape)} (raw grid, not an engine's packed layout)"
        )
    values = decode_scale(scale, name=scale_name(name), power_of_two=power_of_two)
    data = data.contiguous()
    check_codes(name, data)
    if spec.fmt != "e4m3fnuz":
        exact = exact_decode.decode(data, values, dtype, packed=spec.fmt == "e2m1")
        if exact is not None:
            return exact
    return dequantize(Quantized(data, values, spec, shape), dtype)


def check_codes(name: str, data: torch.Tensor) -> None:
    """Raise `UserError` naming the first NaN code of a quantized weight (FP4 has none)."""
    spec = _SPEC_OF_DTYPE[data.dtype]
    codes = FORMATS[spec.fmt].nan_codes
    if not codes or not data.numel():
        return
    if spec.fmt == "e4m3fn" and data.view(torch.int8).max() != 0x7F and data.view(torch.uint8).max() != 0xFF:
        return  # its NaN codes are the largest byte of each signedness
    for code in codes:
        nan = data.view(torch.uint8) == code
        if bool(nan.any()):
            raise UserError(f"{name}{nan.nonzero()[0].tolist()} is NaN (code {code:#04x}); the weight is damaged")


def check_range(name: str, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse values beyond the largest finite BF16: `decode_weight` saturates there, engines get infinities.

    Args:
        name: of the weight, for messages.
        data: as stored, without NaN codes, [rows, in] or [rows, in/2]; the first row begins a block.
        scale: float32, decoded, of the same rows.

    Raises:
        UserError: names the first such element.
    """
    spec = _SPEC_OF_DTYPE[data.dtype]
    limit = torch.finfo(torch.bfloat16).max
    if not data.numel() or float(scale.max()) * FORMATS[spec.fmt].max_value <= limit:
        return
    for first in range(0, data.shape[0], 128):
        codes = data[first : first + 128]
        packed = spec.fmt == "e2m1"
        values = decode(unpack_e2m1(codes), spec.fmt) if packed else codes.float()
        blocks = scale[first // spec.block[0] : -(-(first + codes.shape[0]) // spec.block[0])].double()
        factors = blocks.repeat_interleave(spec.block[0], 0).repeat_interleave(spec.block[1], 1)
        product = values.double() * factors[: values.shape[0], : values.shape[1]]
        beyond = product.abs() > limit
        if bool(beyond.any()):
            row, column = beyond.nonzero()[0].tolist()
            raise UserError(
                f"{name}[{first + row}, {column}] is {float(product[row, column]):.4g}, code times a scale of "
                f"{float(factors[row, column]):.4g}; wanted at most {limit:.4g}, the largest finite BF16: the scale is "
                "damaged"
            )


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise `UserError` naming the first NaN or infinite element of a floating-point tensor."""
    if not tensor.numel():
        return
    extremes = torch.stack(torch.aminmax(tensor.detach()))
    if bool(extremes.isfinite().all()):
        return  # NaN would be both extremes; this pass is an order of magnitude faster than an elementwise test
    finite = tensor.isfinite()
    if not bool(finite.all()):
        index = (~finite).nonzero()[0].tolist()
        raise UserError(
            f"{name}{index} is {float(tensor[tuple(index)])}; weights must be finite, find what produced it"
        )


def require_table(name: str, table: torch.Tensor, experts: int | None = None) -> None:
    """Check a hash-routing table (integer [vocab, top_k]): not all zeros, and ids below `experts` where known.

    Raises:
        UserError: an all-zero table (a sync that never sent it), or an id that is no expert.
    """
    if not bool(table.any()):
        raise UserError(
            f"{name}: all {table.numel()} expert ids are zero; the table was never loaded, send its real ids"
        )
    low, high = int(table.min()), int(table.max())
    if low < 0 or (experts is not None and high >= experts):
        raise UserError(
            f"{name}: expert ids run from {low} to {high}; wanted 0 to {'?' if experts is None else experts - 1}"
        )
