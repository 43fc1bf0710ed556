"""Clamp, SwiGLU and rounding of the expert hidden state, the way the rollout's fused activation does it."""

import math

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.fake_quant import reference_fake_quant
from nemo_rl_dsv4.numerics.formats import NumericsError
from nemo_rl_dsv4.numerics.spec import QuantSpec

BF16_STEPS = ("clamp", "silu", "product")


class _SwigluFakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, spec: QuantSpec | None, limit: float, steps: tuple[str, ...]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit, ctx.steps = limit, steps
        if gate.is_cuda and gate.numel() and spec is not None and spec.block[0] == 1 and spec.keep_last == 0:
            from nemo_rl_dsv4.numerics import fused

            return fused.swiglu_forward(gate, up, spec, limit, steps)
        return swiglu_forward(gate, up, spec, limit, steps)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        gate, up = ctx.saved_tensors
        if gate.is_cuda and gate.numel():
            from nemo_rl_dsv4.numerics import fused

            return *fused.swiglu_backward(grads[0], gate, up, ctx.limit, ctx.steps), None, None, None
        return *swiglu_backward(grads[0], gate, up, ctx.limit, ctx.steps), None, None, None


def swiglu_fake_quant(
    gate: Tensor,
    up: Tensor,
    spec: QuantSpec | None,
    *,
    limit: float = 10.0,
    bf16_steps: tuple[str, ...] = ("product",),
) -> Tensor:
    """fake_quant(silu(min(gate, limit)) * clamp(up, +-limit), spec), the ``expert.hidden`` site; dtype of ``gate``.

    gate, up: [..., I], same shape and dtype. spec None leaves the product unquantized. limit: swiglu_limit of the
    model, inf for none. bf16_steps: after which of "clamp", "silu", "product" the float32 value is rounded to BF16
    (``RolloutProfile.hidden_bf16_steps``). Gradients pass the roundings unchanged and stop where the clamp is active.
    """
    unknown = sorted(set(bf16_steps) - set(BF16_STEPS))
    if unknown:
        raise NumericsError(f"bf16_steps has {unknown}; valid: {', '.join(BF16_STEPS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise NumericsError(
            f"gate is {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)}: wanted the same"
        )
    return _SwigluFakeQuant.apply(gate, up, spec, limit, tuple(bf16_steps))


def swiglu_forward(gate: Tensor, up: Tensor, spec: QuantSpec | None, limit: float, steps: tuple[str, ...]) -> Tensor:
    """The torch reference of the forward."""
    g, u, denominator = _clamped(gate, up, limit, steps)
    silu = _bf16_after("silu", g / denominator, steps)
    product = _bf16_after("product", silu * u, steps)
    return (product if spec is None else reference_fake_quant(product, spec)).to(gate.dtype)


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, limit: float, steps: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """The torch reference of the backward: float32 inside, gradients in the inputs' dtype."""
    g, u, denominator = _clamped(gate, up, limit, steps)
    silu = _bf16_after("silu", g / denominator, steps)
    sigmoid = torch.ones_like(g) / denominator
    grad = grad.to(torch.float32)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    grad_gate = ((grad * u) * slope).masked_fill(gate > limit, 0.0)
    grad_up = (grad * silu).masked_fill(up.abs() > limit, 0.0)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def _clamped(gate: Tensor, up: Tensor, limit: float, steps: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Clamped gate and up, and 1 + exp(-gate), in float32."""
    g, u = gate.to(torch.float32), up.to(torch.float32)
    if limit < math.inf:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    g, u = _bf16_after("clamp", g, steps), _bf16_after("clamp", u, steps)
    return g, u, 1.0 + torch.exp(-g)


def _bf16_after(step: str, value: Tensor, steps: tuple[str, ...]) -> Tensor:
    return value.to(torch.bfloat16).to(torch.float32) if step in steps else value
