"""Straight-through rounding: the forward value is what the rollout computes, the gradient passes unchanged.

Nothing saturates (see :mod:`nemo_rl_dsv4.numerics.blockwise`), so the identity gradient needs no mask.
"""

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.blockwise import SMALL, as_matrix, require_float, scale_blocks, split_kept
from nemo_rl_dsv4.numerics.formats import format_of, round_to_e2m1
from nemo_rl_dsv4.numerics.spec import QuantSpec
from nemo_rl_dsv4.numerics.tiling import chunk_limit, chunks, regions


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, spec: QuantSpec) -> Tensor:
        return fake_quant_values(x, spec)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quant(x: Tensor, spec: QuantSpec) -> Tensor:
    """``dequantize(quantize(x, spec), x.dtype)`` with identity gradient; same shape, dtype and device as ``x``.

    x: float32, bfloat16 or float16 [..., rows, cols] or [cols]. The bits equal those of the two-step form everywhere.
    A block that holds a NaN or Inf comes out as NaN.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, spec)
    return fake_quant_values(x, spec)


def fake_quant_values(x: Tensor, spec: QuantSpec) -> Tensor:
    """dequantize(quantize(x)) in x's dtype without the intermediate bytes; no gradient rule. Same bits, one pass."""
    require_float(x)
    if x.is_cuda and x.numel():
        from nemo_rl_dsv4.numerics import fused

        rounded = fused.fake_quant(as_matrix(x), spec)
        if rounded is not None:
            return rounded.reshape(x.shape)
    return reference_fake_quant(x, spec)


def reference_fake_quant(x: Tensor, spec: QuantSpec) -> Tensor:
    """:func:`fake_quant_values` in torch on any device: what the kernels are compared with."""
    matrix = as_matrix(x)
    body, kept = split_kept(matrix, spec)
    single = (
        kept is None
        and body.numel() <= chunk_limit(body)
        and not any(size % block and size > block for size, block in zip(body.shape[-2:], spec.block, strict=True))
    )
    if single and body.numel():
        return _round_region(body, spec, x.dtype).reshape(x.shape)
    out = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    if kept is not None:
        out[..., body.shape[-1] :].copy_(kept)
    for rows, _ in chunks(body, spec.block[0]):
        chunk = body[rows]
        for region, _ in regions(chunk.shape, spec.block):
            out[..., : body.shape[-1]][rows][region].copy_(_round_region(chunk[region], spec, x.dtype))
    return out.reshape(x.shape)


def _round_region(piece: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Rounded values of a region of whole blocks, [..., rows, cols] in ``dtype``."""
    scaled, scale = scale_blocks(piece, spec)
    limit = torch.finfo(dtype).max
    large_on_cpu = piece.device.type == "cpu" and piece.numel() > SMALL and not torch.compiler.is_compiling()
    if large_on_cpu and spec.fmt != "e2m1" and float(scale.amax()) * 512.0 <= limit:
        codes = scaled.to(format_of(spec.fmt).dtype)
        del scaled  # before the decoded copy is made: two float32 copies of a chunk at a time, not three
        values = _decode_through_half(codes, scale, spec.fmt)
    elif spec.fmt == "e2m1":
        values = round_to_e2m1(scaled).mul_(scale).clamp_(-limit, limit)
    else:
        values = scaled.to(format_of(spec.fmt).dtype).to(torch.float32).mul_(scale).clamp_(-limit, limit)
    return values.reshape(piece.shape).to(dtype)


def _decode_through_half(codes: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """FP8 codes without NaN, times ``scale`` < 2^119, as float32; twice as fast as torch's own decode on a CPU.

    The seven exponent and mantissa bits of either e4m3 format, moved up by seven, are the same number in float16 but
    for the exponent bias (15 against 7 or 8), subnormals included, so the bias goes into the scale.
    """
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half.view(torch.float16).to(torch.float32).mul_(scale * (256.0 if fmt == "e4m3fn" else 128.0))
