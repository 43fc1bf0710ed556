"""Blockwise quantization: the torch reference, on any device, dtype and shape.

One rule for every site: a scale per block of the last two dims, chosen first and rounded first, then the values divided
by that same rounded scale and cast. Dims that are no multiple of the block keep a short last block; leading dims (stacked
experts) never share one. Nothing saturates: scale >= amax / max up to float32 rounding, and max * (1 + 2^-18), the worst
case of the log2f rule, still rounds to max.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import (
    EXPONENT_MASK,
    MANTISSA_MASK,
    MIN_SCALE,
    NumericsError,
    decode,
    encode,
    format_of,
    pack_e2m1,
    round_to_e2m1,
    unpack_e2m1,
)

_CHUNK_ELEMENTS = 1 << 22  # float32 work buffers hold at most this many elements, or one block row if that is longer


@dataclass(frozen=True)
class QuantSpec:
    """How one site is rounded.

    fmt: "e4m3fn" | "e4m3fnuz" | "e2m1". scale: "ue8m0" (smallest power of two >= amax/max) | "float32" (amax/max).
    block: (rows, cols) over the last two dims; (1, g) makes groups of g along the last dim. amax_floor: clamps amax from
    below as kernels do; 0.0 means none, and an all-zero block gets scale 1. keep_last: trailing channels left as they
    are. scale_rounding: "bits" is exact, "log2f" is exp2(ceil(log2f(amax/max))) with a correctly rounded float32 log2, one
    octave lower for quotients a few ulp above a power of two. fnuz_max: the max of e4m3fnuz, 240 (torch) or 224 (vLLM).
    """

    fmt: str = "e4m3fn"
    block: tuple[int, int] = (128, 128)
    scale: str = "ue8m0"
    amax_floor: float = 0.0
    keep_last: int = 0
    scale_rounding: str = "bits"
    fnuz_max: float = 240.0

    def __post_init__(self) -> None:
        format_of(self.fmt)
        object.__setattr__(self, "block", tuple(self.block))
        for field, valid in (
            ("scale", ("ue8m0", "float32")),
            ("scale_rounding", ("bits", "log2f")),
            ("fnuz_max", (224.0, 240.0)),
        ):
            if getattr(self, field) not in valid:
                raise NumericsError(
                    f"QuantSpec.{field} is {getattr(self, field)!r}; valid: {', '.join(map(str, valid))}"
                )
        if len(self.block) != 2 or not all(isinstance(b, int) and b > 0 for b in self.block):
            raise NumericsError(f"QuantSpec.block is {self.block!r}; wanted two positive integers (rows, cols)")
        if not 0.0 <= self.amax_floor < math.inf:
            raise NumericsError(f"QuantSpec.amax_floor is {self.amax_floor!r}; wanted a finite number >= 0")
        if self.keep_last < 0:
            raise NumericsError(f"QuantSpec.keep_last is {self.keep_last!r}; wanted a number of channels >= 0")

    @property
    def max_value(self) -> float:
        """Largest code value the scale aims at: 448, 240 or 224, 6."""
        return self.fnuz_max if self.fmt == "e4m3fnuz" else format_of(self.fmt).max_value


@dataclass
class Quantized:
    """Codes and scales of one tensor.

    data: same shape as the input without its kept channels, torch's FP8 dtype; e2m1: uint8 [..., n/2], low nibble first.
    scale: float32 [..., ceil(rows/block_rows), ceil(cols/block_cols)]. shape: the input's. kept: the last
    ``spec.keep_last`` channels in the input's dtype, None where the spec keeps none.
    """

    data: Tensor
    scale: Tensor
    spec: QuantSpec
    shape: torch.Size
    kept: Tensor | None = None


def block_scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Float32 scale of each block from its largest magnitude (any shape); NaN or Inf in gives NaN or Inf out.

    Never zero and never under 2^-126: smaller ones would be flushed by GPUs and have no usable E8M0 byte.
    """
    amax = amax.to(torch.float32)
    if spec.amax_floor > 0.0:
        amax = amax.clamp_min(spec.amax_floor)
    # A tensor divisor: torch turns division by a Python number into multiplication by its reciprocal on some devices.
    scale = amax / torch.full_like(amax, spec.max_value)
    if spec.scale == "ue8m0":
        finite = scale.isfinite()
        bits = scale.contiguous().view(torch.int32)
        carry = MANTISSA_MASK
        if spec.scale_rounding == "log2f":
            carry = MANTISSA_MASK - _log2f_slack(bits.device)[((bits >> 23) & 0xFF).to(torch.int64)]
        power = ((bits + carry) & EXPONENT_MASK).view(torch.float32)
        scale = torch.where(finite, power, scale)
    scale = scale.clamp_min(MIN_SCALE)
    return scale if spec.amax_floor > 0.0 else scale.masked_fill(amax == 0.0, 1.0)


@functools.cache
def _log2f_slack(device: torch.device) -> Tensor:
    """Per biased exponent, how many ulp above 2^e log2 in float32 still rounds back to the integer e (int32 [256]).

    log2(2^e * (1 + m * 2^-23)) = e + m * 2^-23 / ln 2 rounds to e while the excess is under half the float32 spacing
    beyond e: 2^(floor(log2|e|) - 24) going away from zero. Going towards zero the spacing is that of |e| - 1 rounded up,
    half as wide when |e| is a power of two. At e = 0 every excess is representable.
    """
    table = []
    for exponent in range(-127, 129):
        steps = exponent if exponent > 0 else -exponent - 0.5  # -0.5 picks the spacing on the side towards zero
        half = 0.0 if exponent == 0 else 2.0 ** (math.floor(math.log2(steps)) - 24)
        table.append(math.floor(half * math.log(2.0) * 2.0**23))
    return torch.tensor(table, dtype=torch.int32, device=device)


def quantize(x: Tensor, spec: QuantSpec, *, check_finite: bool = False, name: str = "tensor") -> Quantized:
    """Quantizes ``x`` [..., rows, cols] (float32, bfloat16 or float16; [cols] counts as one row) under ``spec``.

    check_finite: raise NumericsError naming ``name`` and the index of the first NaN or Inf. Without it a block that holds
    one becomes NaN (e2m1 has no NaN, so it always checks).
    """
    check_finite = check_finite or spec.fmt == "e2m1"
    body, kept = _split_kept(_as_matrix(x), spec)
    grid = (*body.shape[:-2], math.ceil(body.shape[-2] / spec.block[0]), math.ceil(body.shape[-1] / spec.block[1]))
    scale = torch.ones(grid, dtype=torch.float32, device=x.device)
    if spec.fmt == "e2m1":
        if body.shape[-1] % 2:
            raise NumericsError(f"{name} has {body.shape[-1]} channels; e2m1 packs two a byte and needs an even number")
        data = torch.empty((*body.shape[:-1], body.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    else:
        data = torch.empty(body.shape, dtype=format_of(spec.fmt).dtype, device=x.device)
    for rows, blocks in _chunks(body, spec.block[0]):
        chunk = body[rows]
        for region, grid_region in _regions(chunk.shape, spec.block):
            piece, tile = chunk[region], scale[blocks][grid_region]
            scaled, block = _scaled(piece, spec)
            if check_finite and not bool(block.isfinite().all()):
                _raise_non_finite(x, name)
            tile.copy_(block.squeeze(-1).squeeze(-2))
            flat = scaled.flatten(-4, -3).flatten(-2, -1)
            if spec.fmt == "e2m1":
                columns = slice(region[-1].start // 2, region[-1].stop // 2)
                data[rows][..., region[-2], columns].copy_(pack_e2m1(encode(flat, "e2m1")))
            else:
                data[rows][region].copy_(flat)
    if x.dim() == 1:
        data, scale, kept = data[0], scale[0], None if kept is None else kept[0]
    return Quantized(data, scale, spec, x.shape, kept)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of ``q`` [*q.shape] in ``dtype``: code times scale in float32, one rounding, kept channels appended.

    A value beyond the largest finite number of ``dtype`` (a code can round up by one sixteenth) saturates there.
    """
    data, scale, spec = _as_matrix(q.data), _as_matrix(q.scale), q.spec
    body = torch.Size((*q.shape[:-1], q.shape[-1] - spec.keep_last)) if q.shape else torch.Size((0,))
    body = body if len(body) > 1 else torch.Size((1, *body))
    out = torch.empty((*body[:-1], q.shape[-1]), dtype=dtype, device=data.device)
    if q.kept is not None:
        out[..., body[-1] :].copy_(_as_matrix(q.kept))
    limit = torch.finfo(dtype).max
    for rows, blocks in _chunks(out[..., : body[-1]], spec.block[0]):
        codes = data[rows]
        values = decode(unpack_e2m1(codes), "e2m1") if spec.fmt == "e2m1" else codes.to(torch.float32)
        for region, grid_region in _regions(values.shape, spec.block):
            piece = _blocked(values[region], spec.block)
            piece = piece.mul(scale[blocks][grid_region][..., :, None, :, None])
            out[rows][region].copy_(piece.flatten(-4, -3).flatten(-2, -1).clamp_(-limit, limit))
    return out.reshape(q.shape)


def _scaled(piece: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Values over scale as float32 [..., m, br, n, bc] and the scale [..., m, 1, n, 1] of a region of whole blocks."""
    blocks = _blocked(piece, spec.block)
    # max and -min rather than abs: no copy of the tensor, and NaN propagates through both
    amax = torch.maximum(blocks.amax((-3, -1), keepdim=True), -blocks.amin((-3, -1), keepdim=True))
    scale = block_scale(amax, spec)
    return blocks / scale, scale


def _as_matrix(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise NumericsError("cannot quantize a scalar: wanted a tensor of one dim or more")
    return x.unsqueeze(0) if x.dim() == 1 else x


def _split_kept(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    if spec.keep_last == 0:
        return x, None
    if spec.keep_last > x.shape[-1]:
        raise NumericsError(f"keep_last is {spec.keep_last} but the tensor has only {x.shape[-1]} channels")
    split = x.shape[-1] - spec.keep_last
    return x[..., :split], x[..., split:].contiguous()


def _blocked(piece: Tensor, block: tuple[int, int]) -> Tensor:
    """View [..., m*br, n*bc] (or one short block a side) as [..., m, br, n, bc]."""
    rows, cols = min(block[0], piece.shape[-2]), min(block[1], piece.shape[-1])
    return piece.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))


def _spans(size: int, block: int) -> list[tuple[slice, slice]]:
    """(elements, blocks) slices of the whole blocks and of the short last block of one dim."""
    whole = size // block
    spans = [(slice(0, whole * block), slice(0, whole))] if whole else []
    return spans + ([(slice(whole * block, size), slice(whole, whole + 1))] if size % block else [])


def _regions(shape: torch.Size, block: tuple[int, int]) -> Iterator[tuple[tuple, tuple]]:
    """Index pairs (into the tensor, into the scale grid) of up to four regions, each made of equal blocks."""
    for rows, row_blocks in _spans(shape[-2], block[0]):
        for cols, col_blocks in _spans(shape[-1], block[1]):
            yield (..., rows, cols), (..., row_blocks, col_blocks)


def _chunks(x: Tensor, block_rows: int, prefix: tuple = ()) -> Iterator[tuple[tuple, tuple]]:
    """Index pairs (into ``x``, into the scale grid) of slices small enough to work on, each of whole block rows."""
    if x.numel() <= _CHUNK_ELEMENTS:
        if x.numel():
            yield (*prefix, ...), (*prefix, ...)
    elif x.dim() > 2 and x[0].numel() > _CHUNK_ELEMENTS:
        for i in range(x.shape[0]):
            yield from _chunks(x[i], block_rows, (*prefix, i))
    elif x.dim() > 2:
        step = _CHUNK_ELEMENTS // x[0].numel()
        for i in range(0, x.shape[0], step):
            yield (*prefix, slice(i, i + step)), (*prefix, slice(i, i + step))
    else:
        step = max(1, _CHUNK_ELEMENTS // (block_rows * x.shape[1]))
        for block in range(0, math.ceil(x.shape[0] / block_rows), step):
            rows = slice(block * block_rows, min((block + step) * block_rows, x.shape[0]))
            yield (*prefix, rows), (*prefix, slice(block, block + step))


def _raise_non_finite(x: Tensor, name: str) -> None:
    index = tuple((~x.isfinite()).nonzero()[0].tolist())
    raise NumericsError(
        f"{name}{list(index)} is {float(x[index])}: quantization needs finite values; find what produced it"
    )


def fake_quant_values(x: Tensor, spec: QuantSpec) -> Tensor:
    """dequantize(quantize(x)) in x's dtype without the intermediate bytes; no gradient rule. Same bits, one pass."""
    matrix = _as_matrix(x)
    body, kept = _split_kept(matrix, spec)
    single = (
        kept is None
        and body.numel() <= _CHUNK_ELEMENTS
        and not any(size % block and size > block for size, block in zip(body.shape[-2:], spec.block, strict=True))
    )
    if single and body.numel():
        return _round_region(body, spec, x.dtype).reshape(x.shape)
    out = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    if kept is not None:
        out[..., body.shape[-1] :].copy_(kept)
    for rows, _ in _chunks(body, spec.block[0]):
        chunk = body[rows]
        for region, _ in _regions(chunk.shape, spec.block):
            out[..., : body.shape[-1]][rows][region].copy_(_round_region(chunk[region], spec, x.dtype))
    return out.reshape(x.shape)


def _round_region(piece: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Rounded values of a region of whole blocks, [..., rows, cols] in ``dtype``."""
    scaled, scale = _scaled(piece, spec)
    eager_cpu = piece.device.type == "cpu" and not torch.compiler.is_compiling()
    limit = torch.finfo(dtype).max
    may_overflow = not eager_cpu or not bool(scale.amax() * 512.0 <= limit)
    if spec.fmt == "e2m1":
        values = round_to_e2m1(scaled).mul_(scale)
    elif may_overflow:
        values = scaled.to(format_of(spec.fmt).dtype).to(torch.float32).mul_(scale)
    else:
        values = _decode_through_half(scaled.to(format_of(spec.fmt).dtype), scale, spec.fmt)
    if may_overflow:
        values = values.clamp_(-limit, limit)
    return values.flatten(-4, -3).flatten(-2, -1).to(dtype)


def _decode_through_half(codes: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """FP8 codes without NaN, times ``scale`` < 2^119, as float32; twice as fast as torch's own decode on a CPU.

    The seven exponent and mantissa bits of either e4m3 format, moved up by seven, are the same number in float16 but for
    the exponent bias (15 against 7 or 8), subnormals included, so the bias goes into the scale.
    """
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half.view(torch.float16).to(torch.float32).mul_(scale * (256.0 if fmt == "e4m3fn" else 128.0))
