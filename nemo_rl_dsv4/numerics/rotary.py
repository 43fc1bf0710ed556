"""Inverse RoPE of the attention output and its rounding before wo_a, with no BF16 step between the two."""

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.fake_quant import reference_fake_quant
from nemo_rl_dsv4.numerics.formats import NumericsError
from nemo_rl_dsv4.numerics.spec import QuantSpec


class _InverseRopeFakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec | None, n_groups: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.shape, ctx.dtype = o.shape, o.dtype
        if o.is_cuda and o.numel() and spec is not None and spec.block[0] == 1 and spec.keep_last == 0:
            from nemo_rl_dsv4.numerics import fused

            return fused.inverse_rope_forward(o, cos, sin, spec, n_groups)
        return inverse_rope_forward(o, cos, sin, spec, n_groups)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grads[0].reshape(ctx.shape)
        if grad.is_cuda and grad.numel():
            from nemo_rl_dsv4.numerics import fused

            return fused.inverse_rope_backward(grad, cos, sin), None, None, None, None
        return inverse_rope_backward(grad, cos, sin), None, None, None, None


def inverse_rope_fake_quant(
    o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec | None, *, n_groups: int = 1
) -> Tensor:
    """The ``o_proj.input`` site: rotates the last 2*P channels of every head back and rounds groups of heads.

    o: attention output [..., H, D]. cos, sin: float32 [..., P] of each token, 2*P <= D, both even; channel pairs are
    interleaved (2p, 2p+1). Returns [..., n_groups, H/n_groups * D] in o's dtype, rounded along the last dim (spec None:
    only rotated). The gradient passes the rounding unchanged and is rotated forward again.
    """
    heads, width = o.shape[-2:]
    if heads % n_groups:
        raise NumericsError(f"{heads} heads do not divide into {n_groups} groups")
    if cos.shape != sin.shape or cos.shape[:-1] != o.shape[:-2] or 2 * cos.shape[-1] > width or width % 2:
        raise NumericsError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit o {list(o.shape)}: "
            f"wanted {list(o.shape[:-2])} + [P] with 2*P at most the head's channels"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise NumericsError(f"cos is {cos.dtype} and sin {sin.dtype}; the rollout rotates with float32 tables")
    return _InverseRopeFakeQuant.apply(o, cos, sin, spec, n_groups)


def inverse_rope_forward(o: Tensor, cos: Tensor, sin: Tensor, spec: QuantSpec | None, n_groups: int) -> Tensor:
    """The torch reference of the forward."""
    rotated = _rotated(o, cos, -sin)
    grouped = rotated.reshape(*o.shape[:-2], n_groups, o.shape[-2] // n_groups * o.shape[-1])
    return (grouped if spec is None else reference_fake_quant(grouped, spec)).to(o.dtype)


def inverse_rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The torch reference of the backward: [..., H, D] gradients rotated forward, in their dtype."""
    return _rotated(grad, cos, sin).to(grad.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float32 copy of [..., H, D] whose last 2*P channels are turned by the angle of each pair."""
    out = x.to(torch.float32, copy=True)
    pairs = out[..., x.shape[-1] - 2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = even * cos - odd * sin, odd * cos + even * sin
    pairs.copy_(torch.stack(turned, -1))
    return out
