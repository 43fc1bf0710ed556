"""What the rollout's hyper-connection kernels compute: float32 mixing with one cast, TF32 weights, norms before a cast.

Shapes: leading dims ... of tokens, N residual streams, D channels. A layer reads `sum_n pre_n stream_n` and writes
`post_j out + sum_k comb_kj stream_k` back to stream j.
"""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError


class _MixStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(post, comb, out, streams)
        if _has_kernel(streams):
            from nemo_rl_dsv4.numerics import fused

            return fused.mix_streams_forward(post, comb, out, streams)
        return mix_streams_forward(post, comb, out, streams)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        post, comb, out, streams = ctx.saved_tensors
        if _has_kernel(streams):
            from nemo_rl_dsv4.numerics import fused

            return fused.mix_streams_backward(grads[0], post, comb, out, streams)
        return mix_streams_backward(grads[0], post, comb, out, streams)


def mix_streams(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """``post_j out + sum_k comb_kj streams_k`` in float32, cast once.

    post [..., N] and comb [..., N, N]: float32. out [..., D] and streams [..., N, D]: the activations' dtype. Returns
    [..., N, D] in that dtype. Gradients are computed in float32 and have the dtypes of what they belong to.
    """
    count = streams.shape[-2]
    wanted = (streams.shape[:-1], (*streams.shape[:-1], count), (*streams.shape[:-2], streams.shape[-1]))
    found = (post.shape, comb.shape, out.shape)
    if tuple(map(tuple, found)) != tuple(map(tuple, wanted)):
        raise NumericsError(
            f"post, comb and out are {', '.join(str(list(s)) for s in found)} beside streams {list(streams.shape)}: "
            f"wanted {', '.join(str(list(s)) for s in wanted)}"
        )
    if post.dtype != torch.float32 or comb.dtype != torch.float32:
        raise NumericsError(f"post is {post.dtype} and comb {comb.dtype}; the rollout mixes with float32 coefficients")
    if out.dtype != streams.dtype:
        raise NumericsError(f"out is {out.dtype} and streams {streams.dtype}: wanted the same")
    return _MixStreams.apply(post, comb, out, streams)


def mix_streams_forward(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """The torch reference of the forward; terms are added in the kernel's order."""
    mixed = post.unsqueeze(-1) * out.unsqueeze(-2).float()
    for k, stream in enumerate(streams.unbind(-2)):
        mixed = torch.addcmul(mixed, comb[..., k, :, None], stream.unsqueeze(-2).float())
    return mixed.to(streams.dtype)


def mix_streams_backward(
    grad: Tensor, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The torch reference of the backward: gradients of post, comb, out and streams."""
    g, x, r = grad.float(), out.float(), streams.float()
    grad_post = (g * x.unsqueeze(-2)).sum(-1)
    grad_comb = torch.matmul(r, g.transpose(-1, -2))
    grad_out = (post.unsqueeze(-1) * g).sum(-2)
    grad_streams = torch.matmul(comb, g)
    return grad_post, grad_comb, grad_out.to(out.dtype), grad_streams.to(streams.dtype)


def _has_kernel(streams: Tensor) -> bool:
    count = streams.shape[-2]
    return streams.is_cuda and streams.numel() > 0 and count & (count - 1) == 0


class _Tf32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, repeats: int) -> Tensor:
        if repeats == 1:
            return tf32_values(weight)
        total = weight.unflatten(-1, (repeats, -1)).sum(-2)
        shift = (tf32_values(total) - total) / repeats
        return weight + shift.repeat(1, repeats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def tf32_weight(weight: Tensor, repeats: int = 1) -> Tensor:
    """A float32 weight [rows, N * D] as TF32 tensor cores read it; the gradient passes the rounding unchanged.

    repeats: N where all streams are one (the first layer): the engine then multiplies that one with the rounded sum of
    the weight's N parts, and the parts returned have that sum.
    """
    if weight.dtype != torch.float32 or weight.shape[-1] % repeats:
        raise NumericsError(
            f"weight is {weight.dtype} {list(weight.shape)}; wanted float32 with a multiple of {repeats} columns"
        )
    return _Tf32.apply(weight, repeats)


def tf32_values(x: Tensor) -> Tensor:
    """float32 values rounded to TF32 (10 mantissa bits), to nearest, ties to even, as TMA loads round them."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class _NormFromSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean_square: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, mean_square, weight)
        ctx.eps = eps
        return (x.float() * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, mean_square, weight = ctx.saved_tensors
        scale = torch.rsqrt(mean_square + ctx.eps)
        normed, grad = x.float() * scale, grads[0].float()
        grad_weight = (grad * normed).sum_to_size(weight.shape).to(weight.dtype)
        inner = grad * weight.float()
        grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), None, grad_weight, None


def norm_from_squares(x: Tensor, mean_square: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a rounded value by the mean square that it had before it was rounded.

    x [..., D]: the activations' dtype. mean_square float32 [..., 1]. weight [D]. Returns x's dtype after one cast. The
    gradient is RMSNorm's: it takes the mean square for x's own.
    """
    return _NormFromSquares.apply(x, mean_square, weight, eps)
