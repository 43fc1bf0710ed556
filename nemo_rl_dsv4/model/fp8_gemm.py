"""Products of FP8 operands: activations in groups of 1x128, weights in blocks of 128x128, float32 accumulation.

Where a GPU has torch's block-scaled GEMM (NVIDIA compute capability 9.x: H100, H200) the operands stay bytes;
everywhere else the same products are emulated: operands are dequantized to float32, in which the product of two codes
with power-of-two scales is exact, and multiplied. The two differ in the order and width of accumulation only.

Gradients are straight-through, as in QAT: the backward pass is two products in the training dtype of the output's
gradient with the *dequantized* operands, the values that the forward pass multiplied. Nothing is quantized in it, and
the rounding itself has gradient one. Saved for it are the bytes, half of what BF16 activations take.

Shapes: M tokens, K in, N out, G groups of an output projection, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from nemo_rl_dsv4.model.weight_rounding import QuantizedWeight
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, quantize

BLOCK = 128
_ROW_MULTIPLE = 4
"""cuBLAS reads the scales of one channel group for all rows in vectors of four."""


def fp8_operands(input_spec: QuantSpec | None, weight_spec: QuantSpec | None) -> bool:
    """Whether two sites are the operands of a block-scaled FP8 product."""
    if input_spec is None or weight_spec is None:
        return False
    formats = {input_spec.fmt, weight_spec.fmt}
    return (
        formats <= {"e4m3fn", "e4m3fnuz"}
        and (input_spec.block, weight_spec.block) == ((1, BLOCK), (BLOCK, BLOCK))
        and input_spec.keep_last == 0
    )


def why_emulated(device: torch.device, input_spec: QuantSpec, *sizes: int) -> str | None:
    """Why a product on `device` is emulated; None where torch's block-scaled GEMM takes it.

    Args:
        device: where the operands are.
        input_spec: the activations' format.
        sizes: the weight's dims, and parts of them that are multiplied apart.
    """
    if device.type != "cuda":
        return f"{device.type} has no FP8 GEMM"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return "torch's block-scaled GEMM needs an NVIDIA GPU of compute capability 9.x"
    if input_spec.fmt != "e4m3fn":
        return f"the format is {input_spec.fmt}"
    if any(size % BLOCK for size in sizes):
        return f"a dim is no multiple of {BLOCK}"
    return None


def _scaled_mm(
    codes_MK: torch.Tensor, scale_MB: torch.Tensor, weight_NK: torch.Tensor, weight_scale: torch.Tensor, dtype: Any
) -> torch.Tensor:
    """[M, N] in `dtype` by torch's block-scaled GEMM; M need not be a multiple of anything."""
    rows = codes_MK.shape[0]
    short = -rows % _ROW_MULTIPLE
    if short:
        codes_MK = F.pad(codes_MK.view(torch.uint8), (0, 0, 0, short)).view(codes_MK.dtype)
        scale_MB = F.pad(scale_MB, (0, 0, 0, short), value=1.0)
    short_blocks = -weight_scale.shape[1] % 4
    if short_blocks:
        weight_scale = F.pad(weight_scale, (0, short_blocks), value=1.0)
    out = F.scaled_mm(
        codes_MK,
        weight_NK.t(),
        scale_MB.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        weight_scale.contiguous().t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return out[:rows] if short else out


def _values(codes: torch.Tensor, scale: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(Quantized(codes, scale, spec, codes.shape), dtype)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, stored: QuantizedWeight, spec: QuantSpec, groups: int
    ) -> torch.Tensor:
        out_features, in_features = weight.shape
        ctx.shape, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.stored, ctx.spec, ctx.groups = stored, spec, groups
        q = quantize(x.reshape(-1, in_features), spec)
        ctx.save_for_backward(q.data, q.scale)
        per_group = out_features // groups
        lead = (*x.shape[:-2], groups, per_group) if groups > 1 else (*x.shape[:-1], out_features)
        if why_emulated(x.device, spec, per_group, in_features) is None:
            codes = q.data.view(-1, groups, in_features)
            scale = q.scale.view(-1, groups, in_features // BLOCK)
            weights = stored.data.view(groups, per_group, in_features)
            weight_scales = stored.scale.view(groups, per_group // BLOCK, -1)
            parts = [_scaled_mm(codes[:, g], scale[:, g], weights[g], weight_scales[g], x.dtype) for g in range(groups)]
            out = parts[0] if groups == 1 else torch.stack(parts, dim=1)
        else:
            values = dequantize(q, torch.float32).view(-1, groups, in_features)
            weights = stored.values(torch.float32).view(groups, per_group, in_features)
            out = torch.bmm(values.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1).to(x.dtype)
        return out.reshape(lead)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        codes, scale = ctx.saved_tensors
        stored: QuantizedWeight = ctx.stored
        out_features, in_features = stored.data.shape
        grad = grads[0].reshape(-1, ctx.groups, out_features // ctx.groups)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weights = stored.values(ctx.dtype).view(ctx.groups, -1, in_features)
            if ctx.groups == 1:
                grad_x = (grad[:, 0] @ weights[0]).view(ctx.shape)
            else:
                grad_x = torch.bmm(grad.transpose(0, 1), weights).transpose(0, 1).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            x = _values(codes, scale, ctx.spec, ctx.dtype).view(-1, ctx.groups, in_features)
            if ctx.groups == 1:
                grad_weight = grad[:, 0].t() @ x[:, 0]
            else:
                grad_weight = torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1)).reshape(out_features, in_features)
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, stored: QuantizedWeight, spec: QuantSpec, *, groups: int = 1
) -> torch.Tensor:
    """Linear layer whose product is FP8, for any number of tokens.

    Args:
        x: [..., K] float32 or BF16; [..., G, K] with groups.
        weight: the parameter [N, K], which gets the gradient; its values are not read.
        stored: its codes and scales.
        spec: format of the input, groups of 1x128.
        groups: G parts of the rows of `weight`, each multiplied with its own slice of `x`.

    Returns:
        [..., N], or [..., G, N / G], in the dtype of `x`.
    """
    return _ScaledLinear.apply(x, weight, stored, spec, groups)


class _ScaledGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, handle: torch.Tensor, ends: torch.Tensor, stored: QuantizedWeight, spec: QuantSpec
    ) -> torch.Tensor:
        q = quantize(x, spec)
        bounds = [0, *ends.tolist()]
        ctx.save_for_backward(q.data, q.scale, ends)
        ctx.bounds, ctx.stored, ctx.spec, ctx.dtype = bounds, stored, spec, x.dtype
        _, in_features, out_features = stored.data.shape
        emulated = why_emulated(x.device, spec, in_features, out_features // stored.halves) is not None
        out = x.new_empty(x.shape[0], out_features)
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if start == end:
                continue
            if emulated:
                one = stored.of_expert(expert).values(torch.float32)
                values = _values(q.data[start:end], q.scale[start:end], spec, torch.float32)
                out[start:end] = (values @ one).to(x.dtype)
            else:
                out[start:end] = _scaled_mm(
                    q.data[start:end], q.scale[start:end], stored.data[expert].t(), stored.scale[expert].t(), x.dtype
                )
        out[bounds[-1] :] = 0.0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        codes, scale, ends = ctx.saved_tensors
        grad, bounds, stored = grads[0].contiguous(), ctx.bounds, ctx.stored
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weights = stored.values(ctx.dtype)
            grad_x = _rows_by_expert(grad, weights.transpose(1, 2), ends, bounds)
        if ctx.needs_input_grad[1]:
            x = _values(codes, scale, ctx.spec, ctx.dtype)
            grad_weight = _weights_by_expert(x, grad, ends, bounds)
        return grad_x, grad_weight, None, None, None


def _rows_by_expert(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """[M, C] from rows [M, B] and weights [E, B, C]: each expert's rows times its matrix."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            out[start:end] = rows[start:end] @ weights[expert]
    return out


def _weights_by_expert(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """[E, B, C] from left [M, B] and right [M, C]: the outer products of each expert's rows, summed."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch._grouped_mm(left.t(), right, offs=ends)
    parts = [left[start:end].t() @ right[start:end] for start, end in pairwise(bounds)]
    return torch.stack(parts)


def scaled_grouped_mm(
    x: torch.Tensor, handle: torch.Tensor, ends: torch.Tensor, stored: QuantizedWeight, spec: QuantSpec
) -> torch.Tensor:
    """Each expert's rows times its matrix, in FP8: `torch._grouped_mm(x, weight, offs=ends)`.

    Args:
        x: [M, K] rows grouped by expert.
        handle: [E, K, N] tensor of the compute dtype that gets the gradient; its values are not read.
        ends: int32 [E], where each expert's rows end.
        stored: codes [E, K, N] laid out as [E, N, K], and scales.
        spec: format of the input, groups of 1x128.

    Returns:
        [M, N] in the dtype of `x`; rows behind the last end are 0.
    """
    return _ScaledGroupedMM.apply(x, handle, ends, stored, spec)


class _Handle(torch.autograd.Function):
    """A stand-in for a weight: its shape and gradient, none of its memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


def weight_handle(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros of `weight`'s shape that takes one element of memory; its gradient goes to `weight`."""
    return _Handle.apply(weight, dtype)
