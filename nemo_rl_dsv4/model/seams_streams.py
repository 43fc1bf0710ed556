"""Seams on the hyper-connections: what AutoModel's block computes inline, between its modules.

The block casts the mixing coefficients to its own dtype and multiplies, adds and collapses streams in expressions that
belong to no module. The seams hand it coefficients that wait: they keep their float32, remember what they were
multiplied with, and compute the engine's result where AutoModel's expression ends. A float32 block computes what it
always did, bit for bit.

Shapes: B batch, S tokens, N streams, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from torch import Tensor, nn

from nemo_rl_dsv4.model.seam import Seam, attach, during, wrap_function
from nemo_rl_dsv4.numerics.hyper_connections import mix_streams, norm_from_squares, tf32_weight
from nemo_rl_dsv4.numerics.products import on_tensor_cores, tf32_linear

MEAN_SQUARE = "_mean_square_before_cast"
"""Attribute of a collapsed BF16 tensor: its mean square [B, S, 1] in float32, before the cast."""


class StreamsBlock(Seam):
    """A block: tells its hyper-connections what dtype its streams have (an FSDP unit may be handed float32 copies)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """AutoModel's block on streams [B, S, N, D]."""
        module: Any = self
        module.attn_hc._narrow = module.ffn_hc._narrow = x.dtype != torch.float32
        return super().forward(x, *args, **kwargs)


class HyperConnection(Seam):
    """Mixing coefficients as the engine computes and applies them."""

    _narrow: bool = False
    _mix_fp32: bool = False
    _tf32: bool = False
    _norm_fp32: bool = False
    _same_streams: bool = False
    """All streams are the embedding: the first block's attention."""

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [B, S, N, D] to pre [B, S, N], post [B, S, N] and comb [B, S, N, N]."""
        if not self._narrow:
            return super().forward(hidden_streams)
        module: Any = self
        projected_first = self._tf32 and on_tensor_cores(hidden_streams)
        with during(_projected_first, self if projected_first else None):
            if self._tf32 and not projected_first:
                fn = module._parameters["fn"].float()
                module.__dict__["fn"] = tf32_weight(fn, module.hc_mult if self._same_streams else 1)
            try:
                pre, post, comb = super().forward(hidden_streams)
            finally:
                module.__dict__.pop("fn", None)
        if self._norm_fp32:
            pre = pre.as_subclass(CollapseWeights)
        if self._mix_fp32:
            post, comb = post.as_subclass(MixWeights), comb.as_subclass(MixWeights)
        return pre, post, comb


_projected_first: ContextVar[Any] = ContextVar("_projected_first", default=None)
"""The hyper-connection whose projection comes before the norm of its streams; None elsewhere."""


def _streams_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, eps: float) -> Tensor:
        module = _projected_first.get()
        if module is None:
            return original(x, eps)
        streams = x.as_subclass(StreamsToProject)
        streams.eps, streams.count = eps, module.hc_mult if module._same_streams else 1
        return streams

    return rms_norm


class StreamNorm(Seam):
    """The norm after a collapse, by the mean square before the collapse was rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] in its own dtype."""
        mean_square = getattr(x, MEAN_SQUARE, None)
        if mean_square is None:
            return super().forward(x)
        module: Any = self
        return norm_from_squares(x, mean_square, module.weight, module.eps)


class Waiting(Tensor):
    """float32 coefficients [..., N] or [..., N, N] that decide themselves how they are applied.

    Whatever is not named here (hooks, shapes, dtypes) is a plain tensor's.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            step = cls.steps().get(func)
            return func(*args, **(kwargs or {})) if step is None else step(*args, **(kwargs or {}))

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Function -> what happens in its place, for plain tensors as arguments."""
        return {}


class MixWeights(Waiting):
    """post or comb: `post.to(dtype).unsqueeze(-1) * out + matmul(comb.transpose(-1, -2).to(dtype), streams)`."""

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """See `Waiting`."""
        return {
            Tensor.to: lambda weights, *args, **kwargs: weights,
            Tensor.unsqueeze: lambda weights, dim: Tensor.unsqueeze(weights, dim).as_subclass(cls),
            Tensor.transpose: lambda weights, a, b: Tensor.transpose(weights, a, b).as_subclass(cls),
            Tensor.mul: _Term,
            Tensor.__mul__: _Term,
            torch.matmul: _Term,
        }


class CollapseWeights(Waiting):
    """pre: `(pre.unsqueeze(-1) * streams).sum(dim=2).to(dtype)`."""

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """See `Waiting`."""
        return {
            Tensor.unsqueeze: lambda weights, dim: Tensor.unsqueeze(weights, dim).as_subclass(cls),
            **dict.fromkeys((Tensor.mul, Tensor.__mul__), _weighted),
        }


class Collapsing(Waiting):
    """Weighted streams on their way to one rounded tensor that knows its mean square."""

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """See `Waiting`."""
        return {Tensor.sum: lambda terms, dim: Tensor.sum(terms, dim=dim).as_subclass(cls), Tensor.to: _collapsed}


def _weighted(weights: Tensor, streams: Tensor) -> Tensor:
    return (_plain(weights) * streams).as_subclass(Collapsing)


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def _collapsed(total: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = _plain(total).to(dtype)
    setattr(rounded, MEAN_SQUARE, _plain(total).detach().square().mean(-1, keepdim=True))
    return rounded


class StreamsToProject(Waiting):
    """Flat streams [..., N * D] on their way through `F.linear(rms_norm(streams), fn)`.

    The kernel multiplies the BF16 streams with TF32 weights, then scales. Where all streams are one (`count` of them)
    it multiplies that one with the sum of the weight's parts.
    """

    eps: float
    count: int

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """See `Waiting`."""
        return {F.linear: _projected}


def _projected(streams: StreamsToProject, weight: Tensor) -> Tensor:
    eps, count, flat = streams.eps, streams.count, _plain(streams)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    if count > 1:
        flat, weight = flat.unflatten(-1, (count, -1))[..., 0, :], weight.unflatten(-1, (count, -1)).sum(-2)
    return tf32_linear(flat, tf32_weight(weight)) * scale


@dataclass(frozen=True)
class _Term:
    """One side of the sum: coefficients [..., N, 1] with out [..., 1, D], or [..., N, N] with streams [..., N, D]."""

    weights: Tensor
    values: Tensor

    def __add__(self, other: _Term) -> Tensor:
        """The mixed streams; the block has post on the left."""
        post, comb = _plain(self.weights).squeeze(-1), _plain(other.weights).transpose(-1, -2)
        return mix_streams(post, comb, self.values.squeeze(-2), other.values)


def attach_streams(layers: Sequence[nn.Module], *, mix_fp32: bool, tf32: bool, norm_fp32: bool) -> None:
    """Put the seams on every block.

    Args:
        layers: AutoModel `DeepseekV4Block`s, in order; the first is the model's first.
        mix_fp32: mix streams with float32 coefficients and one cast.
        tf32: multiply the coefficients' projection with TF32 weights.
        norm_fp32: norms take the mean square of the collapsed streams before their cast.
    """
    wrap_function(v4_layers, "_rms_norm_last_dim", _streams_norm)
    for number, layer in enumerate(layers):
        block: Any = layer
        attach(block, StreamsBlock)
        settings = {"_mix_fp32": mix_fp32, "_tf32": tf32, "_norm_fp32": norm_fp32}
        attach(block.attn_hc, HyperConnection, **settings, _same_streams=number == 0)
        attach(block.ffn_hc, HyperConnection, **settings)
        if norm_fp32:
            attach(block.input_layernorm, StreamNorm)
            attach(block.post_attention_layernorm, StreamNorm)
