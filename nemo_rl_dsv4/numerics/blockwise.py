"""Blockwise quantization: the torch reference, on any device, dtype and shape.

One rule for every site: a scale per block of the last two dims, chosen first and rounded first, then the values divided
by that same rounded scale and cast. Dims that are no multiple of the block keep a short last block; leading dims
(stacked experts) never share one. Nothing saturates: scale >= amax / max up to float32 rounding, and max * (1 + 2^-18),
the worst case of the log2f rule, still rounds to max.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError, decode, encode, format_of, pack_e2m1, unpack_e2m1
from nemo_rl_dsv4.numerics.scales import block_scale
from nemo_rl_dsv4.numerics.spec import QuantSpec
from nemo_rl_dsv4.numerics.tiling import blocked, chunks, grid_shape, regions

SMALL = 1 << 13  # up to here the number of torch calls costs more than the elements


@dataclass
class Quantized:
    """Codes and scales of one tensor.

    data: same shape as the input without its kept channels, torch's FP8 dtype; e2m1: uint8 [..., n/2], low nibble
    first. scale: float32 [..., ceil(rows/block_rows), ceil(cols/block_cols)]. shape: the input's. kept: the last
    ``spec.keep_last`` channels in the input's dtype, None where the spec keeps none.
    """

    data: Tensor
    scale: Tensor
    spec: QuantSpec
    shape: torch.Size
    kept: Tensor | None = None


@torch.no_grad()
def quantize(x: Tensor, spec: QuantSpec, *, check_finite: bool = False, name: str = "tensor") -> Quantized:
    """Quantizes ``x`` [..., rows, cols] (float32, bfloat16 or float16; [cols] counts as one row) under ``spec``.

    check_finite: raise NumericsError naming ``name`` and the index of the first NaN or Inf. Without it a block that
    holds one becomes NaN (e2m1 has no NaN, so it always checks).
    """
    require_float(x, name)
    if x.is_cuda and x.numel():
        from nemo_rl_dsv4.numerics import fused

        pair = fused.quantize(as_matrix(x), spec)
        if pair is not None:
            if check_finite and not bool(pair[1].isfinite().all()):
                _raise_non_finite(x, name)
            data, scale = (t[0] for t in pair) if x.dim() == 1 else pair
            return Quantized(data, scale, spec, x.shape)
    return reference_quantize(x, spec, check_finite=check_finite, name=name)


@torch.no_grad()
def reference_quantize(x: Tensor, spec: QuantSpec, *, check_finite: bool = False, name: str = "tensor") -> Quantized:
    """:func:`quantize` in torch on any device: what the kernels are compared with."""
    check_finite = check_finite or spec.fmt == "e2m1"
    body, kept = split_kept(as_matrix(x), spec)
    scale = torch.ones(grid_shape(body.shape, spec.block), dtype=torch.float32, device=x.device)
    if spec.fmt == "e2m1":
        if body.shape[-1] % 2:
            raise NumericsError(f"{name} has {body.shape[-1]} channels; e2m1 packs two a byte and needs an even number")
        data = torch.empty((*body.shape[:-1], body.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    else:
        data = torch.empty(body.shape, dtype=format_of(spec.fmt).dtype, device=x.device)
    for rows, blocks in chunks(body, spec.block[0]):
        for region, grid_region in regions(body[rows].shape, spec.block):
            tile = scale[blocks][grid_region]
            _quantize_region(body[rows][region], spec, data[rows][_packed(region, spec)], tile)
            if check_finite and not bool(tile.isfinite().all()):
                _raise_non_finite(x, name)
    if x.dim() == 1:
        data, scale, kept = data[0], scale[0], None if kept is None else kept[0]
    return Quantized(data, scale, spec, x.shape, kept)


@torch.no_grad()
def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of ``q`` [*q.shape] in ``dtype``: code times scale in float32, one rounding, kept channels appended.

    A value beyond the largest finite number of ``dtype`` (a code can round up by one sixteenth) saturates there.
    """
    if q.data.is_cuda and q.data.numel():
        from nemo_rl_dsv4.numerics import fused

        values = fused.dequantize(as_matrix(q.data), as_matrix(q.scale), q.spec, dtype)
        if values is not None:
            return values.reshape(q.shape)
    return reference_dequantize(q, dtype)


@torch.no_grad()
def reference_dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """:func:`dequantize` in torch on any device."""
    data, scale, spec = as_matrix(q.data), as_matrix(q.scale), q.spec
    body = torch.Size((*q.shape[:-1], q.shape[-1] - spec.keep_last)) if q.shape else torch.Size((0,))
    body = body if len(body) > 1 else torch.Size((1, *body))
    out = torch.empty((*body[:-1], q.shape[-1]), dtype=dtype, device=data.device)
    if q.kept is not None:
        out[..., body[-1] :].copy_(as_matrix(q.kept))
    limit = torch.finfo(dtype).max
    for rows, blocks in chunks(out[..., : body[-1]], spec.block[0]):
        for region, grid_region in regions(out[..., : body[-1]][rows].shape, spec.block):
            codes = data[rows][_packed(region, spec)]
            _dequantize_region(codes, spec, scale[blocks][grid_region], out[rows][region], limit)
    return out.reshape(q.shape)


# Each region is worked on in a function of its own: its float32 buffers are freed before the next one's are made.


def _quantize_region(piece: Tensor, spec: QuantSpec, codes_out: Tensor, scale_out: Tensor) -> None:
    scaled, scale = scale_blocks(piece, spec)
    scale_out.copy_(scale.squeeze(-1).squeeze(-2))
    values = scaled.reshape(piece.shape)
    if spec.fmt == "e2m1" and bool(scale.isfinite().all()):
        codes_out.copy_(pack_e2m1(encode(values, "e2m1")))
    elif spec.fmt != "e2m1":
        codes_out.copy_(values)


def _dequantize_region(codes: Tensor, spec: QuantSpec, scale: Tensor, out: Tensor, limit: float) -> None:
    values = decode(unpack_e2m1(codes), "e2m1") if spec.fmt == "e2m1" else codes.to(torch.float32)
    blocked(values, spec.block).mul_(scale[..., :, None, :, None])
    out.copy_(values.clamp_(-limit, limit))


def _packed(region: tuple, spec: QuantSpec) -> tuple:
    """The region's index into the codes, which e2m1 packs two a byte."""
    if spec.fmt != "e2m1":
        return region
    *lead, columns = region
    return (*lead, slice(columns.start // 2, columns.stop // 2))


def scale_blocks(piece: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Values over scale as float32 [..., m, br, n, bc] and the scale [..., m, 1, n, 1] of a region of whole blocks."""
    blocks = blocked(piece, spec.block).to(torch.float32)
    if piece.numel() <= SMALL:
        amax = blocks.abs().amax((-3, -1), keepdim=True)
    else:  # no copy of the tensor, and NaN propagates through both
        amax = torch.maximum(blocks.amax((-3, -1), keepdim=True), blocks.amin((-3, -1), keepdim=True).neg())
    scale = block_scale(amax, spec)
    into = blocks if piece.dtype != torch.float32 else None  # a copy of our own is reused, the caller's data is not
    if spec.scale == "ue8m0":  # the reciprocal of a power of two is exact: multiplying gives the bits of the division
        return torch.mul(blocks, scale.reciprocal(), out=into), scale
    return torch.div(blocks, scale, out=into), scale


def require_float(x: Tensor, name: str = "tensor") -> None:
    """Raises NumericsError unless ``x`` is float32, bfloat16 or float16: bytes are codes, not values to quantize."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NumericsError(f"{name} is {x.dtype}; quantization wants float32, bfloat16 or float16 values")


def as_matrix(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise NumericsError("cannot quantize a scalar: wanted a tensor of one dim or more")
    return x.unsqueeze(0) if x.dim() == 1 else x


def split_kept(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    if spec.keep_last == 0:
        return x, None
    if spec.keep_last > x.shape[-1]:
        raise NumericsError(f"keep_last is {spec.keep_last} but the tensor has only {x.shape[-1]} channels")
    split = x.shape[-1] - spec.keep_last
    return x[..., :split], x[..., split:].contiguous()


def _raise_non_finite(x: Tensor, name: str) -> None:
    index = tuple((~x.isfinite()).nonzero()[0].tolist())
    raise NumericsError(
        f"{name}{list(index)} is {float(x[index])}: quantization needs finite values; find what produced it"
    )
