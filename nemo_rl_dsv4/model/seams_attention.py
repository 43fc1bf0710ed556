"""Seams inside attention: KV cache entries, indexer scores, and the way from the attention output to wo_a.

Shapes: B batch, S tokens, H heads, D channels of a head of which the last R carry RoPE, G output groups.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4 import cp as v4_cp
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.seam import Seam, attach, during, engine_dtype, wrap_function
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.attention import attend_with_rounded_weights
from nemo_rl_dsv4.numerics.products import bf16_scores
from nemo_rl_dsv4.numerics.rotary import inverse_rope_fake_quant

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Call:
    """One forward pass of one attention module.

    Attributes:
        tables: the (cos, sin) pairs that the module was given.
        dtype: of the activations.
        seam: the attention module, for its settings.
        tokens: of the whole sequence, all context-parallel ranks together; keys behind them are compressed entries.
        undone: the pair whose inverse rotation wo_a still has to make, once it is known.
    """

    tables: list[Tables]
    dtype: torch.dtype
    seam: AttentionCall
    tokens: int
    undone: Tables | None = None

    def forward_pair(self, cos: torch.Tensor, sin: torch.Tensor) -> Tables | None:
        """The pair an inverse rotation by (cos, -sin) undoes; None for a forward rotation or other tables.

        AutoModel hands the very objects on, and negates the sine for the inverse only.
        """
        return next(((c, s) for c, s in self.tables if cos is c and sin is not s), None)


_call: ContextVar[_Call | None] = ContextVar("attention_call", default=None)
_scores: ContextVar[dict[str, QuantSpec] | None] = ContextVar("score_rounding", default=None)


class AttentionCall(Seam):
    """Marks the extent of one attention forward for the wrapped functions below."""

    _o_proj_fused: bool = False
    _query_norm_fp32: bool = False
    _attention_fp32: bool = False
    _attention_probs_bf16: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """AutoModel's attention; arguments as it has them."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        given = [kwargs.get("position_embeddings"), kwargs.get("position_embeddings_compress"), *args[1:2], *args[3:4]]
        tables = [pair for pair in given if pair is not None]
        group = kwargs.get("_dsv4_cp_group") or getattr(self, "_cp_group", None)
        tokens = hidden.shape[1] * v4_cp.dsv4_cp_size(group)
        with during(_call, _Call(tables, hidden.dtype, self, tokens)):
            return super().forward(*args, **kwargs)


class OutputProjection(Seam):
    """wo_a: undoes RoPE in float32 on the BF16 attention output and rounds that, with no BF16 step in between."""

    _output_spec: QuantSpec
    _heads: int
    _rope_dim: int

    def forward(self, x_BSGK: torch.Tensor) -> torch.Tensor:
        """Takes [B, S, G, H/G * D] before the inverse rotation, which `_rope` skipped."""
        call = _call.get()
        assert call is not None and call.undone is not None, "wo_a ran outside its attention"
        batch, length, groups, width = x_BSGK.shape
        half = self._rope_dim // 2  # AutoModel's tables hold every angle twice
        cos, sin = (table[..., :half].float().expand(batch, length, half).contiguous() for table in call.undone)
        x_BSHD = x_BSGK.reshape(batch, length, self._heads, groups * width // self._heads)
        return super().forward(inverse_rope_fake_quant(x_BSHD, cos, sin, self._output_spec, n_groups=groups))


class KvNorm(Seam):
    """A KV norm whose output is rounded as the cache stores it; RoPE, which follows, touches kept channels only."""

    _kv_spec: QuantSpec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D]; inside a float32 compressor the NoPE channels are rounded to the activations' dtype first."""
        out, dtype = super().forward(x), engine_dtype.get()
        if dtype is None or dtype == out.dtype:
            return fake_quant(out, self._kv_spec)
        split = out.shape[-1] - self._kv_spec.keep_last
        nope = fake_quant(out[..., :split].to(dtype), replace(self._kv_spec, keep_last=0))
        return torch.cat([nope.to(out.dtype), out[..., split:]], dim=-1)


class Fp32Compressor(Seam):
    """A compressor that keeps pooled entries in float32 through its norm and RoPE, and rounds them once."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """AutoModel's compressor; entries come back in `hidden_states`' dtype."""
        dtype = hidden_states.dtype
        if dtype == torch.float32:
            return super().forward(hidden_states, *args, **kwargs)
        with during(engine_dtype, dtype):
            pooled, *rest = super().forward(hidden_states.float(), *args, **kwargs)
        return (pooled.to(dtype), *rest)


class RoundedScores(Seam):
    """The indexer: its queries and keys are rounded where they meet."""

    _score_rounding: dict[str, QuantSpec]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """AutoModel's indexer."""
        with during(_scores, self._score_rounding):
            return super().forward(*args, **kwargs)


def _rope(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope_head_dim: int) -> torch.Tensor:
        call = _call.get()
        if call is None:
            return original(x, cos, sin, rope_head_dim)
        pair = call.forward_pair(cos, sin) if call.seam._o_proj_fused else None
        if pair is not None:
            call.undone = pair
            return x
        out = original(x, cos, sin, rope_head_dim)
        is_query = call.seam._query_norm_fp32 and any(cos is c for c, _ in call.tables)
        return out.to(call.dtype) if is_query else out

    return apply_rope


def _query_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
        call = _call.get()
        return original(x.float() if call is not None and call.seam._query_norm_fp32 else x, eps)

    return rms_norm


def _attend(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
        call = _call.get()
        if call is None or query.dtype == torch.float32:
            return original(module, query, key, value, *args, **kwargs)
        if call.seam._attention_probs_bf16:
            return _attend_rounded(module, query, key, value, call, *args, **kwargs), None
        if not call.seam._attention_fp32:
            return original(module, query, key, value, *args, **kwargs)
        out, probs = original(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return out.to(query.dtype), probs

    return attention


def _attend_rounded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: _Call,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[B, H, S, D] queries, [B, 1, K, D] keys and values and an additive mask to [B, S, H, D] in the queries' dtype."""
    if dropout:
        raise UserError(
            f"attention_dropout is {dropout}; policy.dsv4.alignment.attention_probs_bf16 wants 0, since an engine "
            "drops nothing: set policy.hf_config_overrides.attention_dropout=0, or the switch to false"
        )
    wide = call.seam._attention_fp32
    scores = bf16_scores(query, key) if wide else torch.matmul(query, key.transpose(2, 3)).float()
    largest_window = module.sliding_window
    if attention_mask is None:
        visible = torch.ones(1, 1, *scores.shape[2:], dtype=torch.bool, device=query.device)
        largest_window = call.tokens
    else:
        visible = attention_mask[..., : scores.shape[-1]] == 0  # additive: everything else is far below any score
    out = attend_with_rounded_weights(
        scores,
        value,
        visible,
        module.sinks_param(query),
        scaling=scaling,
        window=call.tokens,
        largest_window=largest_window,
    )
    return out.to(query.dtype).transpose(1, 2).contiguous()


def _score(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def indexer_scores(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        specs, k = _scores.get() or {}, k.to(q.dtype)
        q = fake_quant(q, specs["indexer.q"]) if "indexer.q" in specs else q
        k = fake_quant(k, specs["indexer.k"]) if "indexer.k" in specs else k
        return original(q, k, *args, **kwargs)

    return indexer_scores


def attach_attention_call(attention: nn.Module, **settings: bool) -> None:
    """Attach `AttentionCall`, or change the settings of the one that is there."""
    wrap_function(v4_layers, "_apply_partial_rope", _rope)
    wrap_function(v4_layers, "_rms_norm_last_dim", _query_norm)
    wrap_function(v4_layers, "eager_attention_with_sink", _attend)
    if not isinstance(attention, AttentionCall):
        attach(attention, AttentionCall)
    for name, value in settings.items():
        setattr(attention, f"_{name}", value)


def fuse_inverse_rope(attention: Any, spec: QuantSpec) -> None:
    """Round wo_a's input straight from the float32 inverse rotation."""
    attach_attention_call(attention, o_proj_fused=True)
    heads, rope_dim = attention.num_heads, attention.rope_head_dim
    attach(attention.wo_a, OutputProjection, _output_spec=spec, _heads=heads, _rope_dim=rope_dim)


def round_kv(norm: nn.Module, spec: QuantSpec, rope_dim: int) -> None:
    """Round a KV norm's output but for the trailing RoPE channels."""
    attach(norm, KvNorm, _kv_spec=replace(spec, keep_last=rope_dim))


def round_scores(indexer: nn.Module, specs: dict[str, QuantSpec]) -> None:
    """Round the indexer's queries (`indexer.q`) and keys (`indexer.k`), whichever `specs` has."""
    wrap_function(v4_layers, "dsv4_indexer_scores", _score)
    attach(indexer, RoundedScores, _score_rounding=specs)
