"""What an FP8 engine computes between its rounding sites, on transformers' DeepSeek-V4, in BF16 or float32.

transformers rounds to BF16 where it is convenient; the engine's kernels keep float32 inside a kernel and round once at
its end. Nothing here changes a float32 model beyond the order of a sum. AutoModel's counterpart is
`nemo_rl_dsv4.model.alignment`; the two share `nemo_rl_dsv4.numerics` and the means of attaching, not the formulas.

Shapes: B batch, S tokens, T routed tokens, H heads, D channels of a head, K chosen experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.model.seam import Seam, attach, during, wrap_function
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.attention import BLOCK, LARGEST_POWER
from nemo_rl_dsv4.numerics.hyper_connections import tf32_values
from nemo_rl_dsv4.numerics.profiles import RolloutProfile
from nemo_rl_dsv4.numerics.rotary import inverse_rope_fake_quant
from nemo_rl_dsv4.numerics.swiglu import swiglu_fake_quant


@dataclass
class _Attention:
    """One forward pass of one attention layer.

    Attributes:
        cos, sin: its RoPE tables.
        dtype: of the activations.
        fused: wo_a undoes the rotation.
        probs_bf16: weights are rounded before they meet the values.
        entries: how many of the keys, at their end, are compressed; known once the compressor has run.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    dtype: torch.dtype
    fused: bool
    probs_bf16: bool
    entries: int = 0


_attention: ContextVar[_Attention | None] = ContextVar("engine_attention", default=None)
_mean_square: ContextVar[torch.Tensor | None] = ContextVar("mean_square_before_cast", default=None)
_around: ContextVar[torch.dtype | None] = ContextVar("engine_activations", default=None)


class EngineAttention(Seam):
    """Marks one attention layer's forward for the wrapped functions."""

    _fused: bool
    _probs_bf16: bool

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        """transformers' attention."""
        cos, sin = position_embeddings[self.rope_layer_type]  # type: ignore[attr-defined]
        with during(_attention, _Attention(cos, sin, hidden_states.dtype, self._fused, self._probs_bf16)):
            return super().forward(hidden_states, position_embeddings, **kwargs)


class EngineOutput(Seam):
    """wo_a: inverse RoPE in float32 and rounding in one step."""

    _spec: QuantSpec
    _heads: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, G, H/G * D] before the inverse rotation."""
        call = _attention.get()
        assert call is not None, "wo_a ran outside its attention layer"
        batch, length, groups, width = x.shape
        heads = x.reshape(batch, length, self._heads, groups * width // self._heads)
        cos, sin = (t.float().expand(batch, length, -1).contiguous() for t in (call.cos, call.sin))
        return super().forward(inverse_rope_fake_quant(heads, cos, sin, self._spec, n_groups=groups))


class EngineNorm(Seam):
    """RMSNorm in float32 with one cast at its end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] in its own dtype."""
        module: Any = self
        wide = x.float()
        known = _mean_square.get()
        mean_square = wide.square().mean(-1, keepdim=True) if known is None else known
        normed = wide * torch.rsqrt(mean_square + module.variance_epsilon)
        return (module.weight.float() * normed).to(x.dtype)


class EngineKvNorm(Seam):
    """A KV norm: NoPE channels as the cache holds them, RoPE channels untouched."""

    _spec: QuantSpec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D]; inside a compressor `x` is float32 and the cache's BF16 comes first."""
        out = super().forward(x)
        nope, rope = out.split([out.shape[-1] - self._spec.keep_last, self._spec.keep_last], dim=-1)
        stored = fake_quant(nope.to(_around.get() or out.dtype), replace(self._spec, keep_last=0))
        return torch.cat([stored.to(out.dtype), rope], dim=-1)


class InFloat32(Seam):
    """A module whose first argument goes to float32: query norm, routers."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' forward on float32."""
        return super().forward(x.float(), *args, **kwargs)


class EngineRope(Seam):
    """Rotary tables in float32."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers takes only device and dtype from `x`."""
        return super().forward(x.new_empty(0, dtype=torch.float32), *args, **kwargs)


class EngineCompressor(Seam):
    """Float32 from pooling to RoPE, then one cast."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' compressor."""
        with during(_around, hidden_states.dtype):
            compressed, bias = super().forward(hidden_states.float(), *args, **kwargs)
        call = _attention.get()
        if call is not None:
            call.entries = compressed.shape[2]
        return compressed.to(hidden_states.dtype), bias


class EngineLayer(Seam):
    """A layer whose streams are mixed in float32 and cast once."""

    _norm_fp32: bool

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """[B, S, N, D] streams to the same; `post * out + comb^T streams` after attention and after the experts."""
        module: Any = self
        dtype = hidden_states.dtype
        streams = hidden_states.float()
        for mixer, norm, run in (
            (module.attn_hc, module.input_layernorm, lambda x: module.self_attn(x, **kwargs)[0]),
            (module.ffn_hc, module.post_attention_layernorm, lambda x: module.mlp(x, input_ids=input_ids)),
        ):
            post, comb, collapsed = mixer(streams)
            with during(_mean_square, collapsed.square().mean(-1, keepdim=True) if self._norm_fp32 else None):
                normed = norm(collapsed.to(dtype))
            mixed = torch.einsum("bskj,bskd->bsjd", comb, streams) + post[..., None] * run(normed)[:, :, None].float()
            streams = mixed.to(dtype).float()
        return streams.to(dtype)


class EngineMixer(Seam):
    """Hyper-connection coefficients from TF32 weights, of the one embedding where all streams are it."""

    _first: bool

    def forward(self, hidden_streams: torch.Tensor) -> Any:
        """transformers' forward on [B, S, N, D]."""
        module: Any = self
        kept = module.fn.data
        if self._first:
            parts = list(kept.chunk(module.hc_mult, dim=-1))
            total = torch.stack(parts).sum(0)
            read = torch.cat([tf32_values(total), *(torch.zeros_like(part) for part in parts[1:])], dim=-1)
        else:
            read = tf32_values(kept)
        module.fn.data = read
        try:
            return super().forward(hidden_streams)
        finally:
            module.fn.data = kept


class EngineScorer(Seam):
    """The indexer's scores of rounded queries and keys."""

    _query: QuantSpec | None
    _keys: QuantSpec | None

    def forward(self, q: torch.Tensor, keys: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """q [B, S, H, D], keys [B, N, D] and hidden states, brought to the activations' dtype first."""
        dtype = self.weights_proj.weight.dtype  # type: ignore[attr-defined]
        q, keys = q.to(dtype), keys.to(dtype)
        q = q if self._query is None else fake_quant(q, self._query)
        keys = keys if self._keys is None or keys.shape[1] == 0 else fake_quant(keys, self._keys)
        return super().forward(q, keys, hidden_states.to(dtype))


class EngineMlp(Seam):
    """A shared expert."""

    _spec: QuantSpec | None
    _steps: tuple[str, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        module: Any = self
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(hidden_state(gate, up, self._spec, module.limit, self._steps))


class EngineExperts(Seam):
    """Routed experts: BF16 products, weighted and summed in float32, one cast."""

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, hidden], [T, K] expert ids and [T, K] float32 weights to [T, hidden]."""
        module: Any = self
        total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            hidden = module._apply_gate(nn.functional.linear(hidden_states[token], module.gate_up_proj[expert]))
            out = nn.functional.linear(hidden, module.down_proj[expert])
            total.index_add_(0, token, out.float() * weights[token, slot, None].float())
        return total.to(hidden_states.dtype)


def hidden_state(
    gate: torch.Tensor, up: torch.Tensor, spec: QuantSpec | None, limit: float, steps: tuple[str, ...]
) -> torch.Tensor:
    """Clamp, SwiGLU and rounding; a float32 model makes no BF16 steps."""
    return swiglu_fake_quant(gate, up, spec, limit=limit, bf16_steps=() if gate.dtype == torch.float32 else steps)


def _rope(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_rotary_pos_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any):
        call = _attention.get()
        if call is None or cos is not call.cos:
            return original(x, cos, sin, *args, **kwargs)
        if sin is not call.sin and call.fused:
            return x
        return original(x, cos, sin, *args, **kwargs).to(call.dtype)

    return apply_rotary_pos_emb


def _attend(original: Callable[..., Any]) -> Callable[..., Any]:
    def eager_attention_forward(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *a, **k
    ):
        call = _attention.get()
        if call is None:
            return original(module, query, key, value, *a, **k)
        if call.probs_bf16 and query.dtype != torch.float32:
            out = flash_attention(module, query, key, value, call.entries, *a, **k)
            return out.to(query.dtype).transpose(1, 2).contiguous(), None
        out, probs = original(module, query.float(), key.float(), value.float(), *a, **k)
        return out.to(query.dtype), probs

    return eager_attention_forward


def flash_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    entries: int,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention block by block of 64 keys, as FlashMLA decodes: online softmax with BF16 weights.

    Query [B, H, S, D]; key and value [B, 1, K, D], the last `entries` of them compressed; an additive mask. Returns
    float32 [B, H, S, D].
    """
    q, k, v = query.float(), key.float(), value.float()
    scores = torch.matmul(q, k.transpose(2, 3)) * (scaling * math.log2(math.e))
    window = k.shape[2] - entries
    seen = torch.ones_like(scores[:, :1], dtype=torch.bool)
    if attention_mask is not None:
        seen = (attention_mask[..., : k.shape[2]] == 0).expand_as(seen)
    slots = torch.cumsum(seen[..., :window], -1) - 1
    padded = (slots[..., -1:] + BLOCK) // BLOCK * BLOCK
    slots = torch.cat([slots, padded + torch.cumsum(seen[..., window:], -1) - 1], -1)
    slots = slots.masked_fill(~seen, -1)
    top = torch.full_like(scores[..., :1], -1e30)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first in range(0, int(slots.max()) + 1, BLOCK):
        inside = (slots >= first) & (slots < first + BLOCK)
        block = scores.masked_fill(~inside, -math.inf)
        higher = torch.maximum(top, block.amax(-1, keepdim=True))
        weights, shrink = torch.exp2(block - higher), torch.exp2(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.matmul(weights.bfloat16().float(), v)
        top = higher
    sink = torch.exp2((module.sinks.float().view(-1, 1, 1) * math.log2(math.e) - top).clamp(max=LARGEST_POWER))
    return out / (total + sink).clamp(min=torch.finfo(torch.float32).tiny)


def install_engine_numerics(model: hf.DeepseekV4ForCausalLM, dtype: torch.dtype, profile: RolloutProfile) -> None:
    """Cast the model to `dtype`, but for what the engine keeps in float32, and attach what no rounding site needs.

    Hyper-connections are the profile's with BF16 only: engines have no float32 streams. Float32 stay their weights,
    sinks, position tables, norms, routers, and the compressors' two projections, whose weights arrive in BF16 and whose
    products the engine leaves in float32.
    """
    wrap_function(hf, "apply_rotary_pos_emb", _rope)
    wrap_function(hf, "eager_attention_forward", _attend)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    nn.Module.to(model, dtype)
    for name, buffer in frequencies.items():  # no checkpoint brings them back
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    for module in list(model.modules()):
        if isinstance(module, hf.DeepseekV4HyperConnection | hf.DeepseekV4HyperHead):
            module.float()
        elif isinstance(module, hf.DeepseekV4DecoderLayer) and dtype != torch.float32:
            if profile.hc_mix_fp32:
                attach(module, EngineLayer, _norm_fp32=profile.hc_norm_fp32)
            if profile.hc_tf32:
                attach(module.attn_hc, EngineMixer, _first=module.layer_idx == 0)
                attach(module.ffn_hc, EngineMixer, _first=False)
        elif isinstance(module, hf.DeepseekV4Attention):
            module.sinks.data = module.sinks.data.float()
            attach(module, EngineAttention, _fused=False, _probs_bf16=profile.attention_probs_bf16)
            attach(module.q_b_norm, InFloat32)
        elif isinstance(module, hf.DeepseekV4RMSNorm):
            attach(module.float(), EngineNorm)
        elif isinstance(module, hf.DeepseekV4RotaryEmbedding):
            attach(module, EngineRope)
        elif isinstance(module, hf.DeepseekV4TopKRouter | hf.DeepseekV4HashRouter):
            attach(module.float(), InFloat32)
        elif isinstance(module, hf.DeepseekV4Experts) and dtype != torch.float32:
            attach(module, EngineExperts)
        if isinstance(module, hf.DeepseekV4HCACompressor | hf.DeepseekV4CSACompressor | hf.DeepseekV4Indexer):
            module.kv_proj.float()
            module.gate_proj.float()
            module.position_bias.data = module.position_bias.data.float()
            if not isinstance(module, hf.DeepseekV4Indexer):
                attach(module, EngineCompressor)
