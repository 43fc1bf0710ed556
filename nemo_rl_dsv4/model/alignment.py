"""Make an AutoModel DeepSeek-V4 compute what the rollout engine computes between the rounding sites, from outside.

One small seam for each switch of `nemo_rl_dsv4.numerics.alignment`. All but `routing_weight_after_down` and
`yarn_on_window_layers` only move BF16 casts, and change no bit of a float32 model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.models.deepseek_v4 import model as v4_model
from nemo_automodel.components.moe.experts import GroupedExpertsDeepEP
from nemo_automodel.components.moe.layers import MLP, Gate, MoE
from torch import Tensor, nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.seam import Seam, attach, during, engine_dtype, wrap_function
from nemo_rl_dsv4.model.seams_attention import Fp32Compressor, attach_attention_call
from nemo_rl_dsv4.model.seams_experts import AUTOMODEL_STEPS, expert_class, set_hidden
from nemo_rl_dsv4.model.seams_linear import CastsInput, EngineWeight
from nemo_rl_dsv4.model.seams_streams import Waiting, attach_streams
from nemo_rl_dsv4.numerics.alignment import SWITCHES
from nemo_rl_dsv4.numerics.products import bf16_linear, on_tensor_cores
from nemo_rl_dsv4.numerics.profiles import RolloutProfile


class Fp32Rope(Seam):
    """Rotary tables in float32, whatever the activations are."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32; AutoModel takes only device and dtype from `x`."""
        return super().forward(x.new_empty(0, dtype=torch.float32), position_ids)


class RouterInput(Waiting):
    """float32 tokens of BF16 values, whose product with a router's weight is taken on tensor cores."""

    @classmethod
    def steps(cls) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """See `Waiting`."""
        return {
            **dict.fromkeys((Tensor.to, Tensor.float), lambda x, *args, **kwargs: x),
            F.linear: lambda x, weight, bias=None: bf16_linear(x.as_subclass(Tensor), weight, bias),
        }


class Fp32Gate(Seam):
    """A router (scored or hashed) whose logits, weights, or both are float32."""

    _logits_fp32: bool = False
    _weights_fp32: bool = False

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """[T, hidden] to routing weights [T, k], expert ids [T, k], and AutoModel's auxiliary loss."""
        module: Any = self
        float32 = self._logits_fp32 or not hasattr(module, "router_weights_fp32")  # a hash gate's logits always are
        given = x
        if float32:
            bf16 = x.dtype == module.weight.dtype == torch.bfloat16
            given = x.float().as_subclass(RouterInput) if bf16 and on_tensor_cores(x) else x.float()
        weights, indices, aux_loss = super().forward(given, *args, **kwargs)
        return weights if self._weights_fp32 else weights.to(x.dtype), indices, aux_loss


def _head(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_lm_head_logits(lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with during(engine_dtype, hidden_states.dtype):
            return original(lm_head, hidden_states, *args, **kwargs)

    return compute_lm_head_logits


def resolve_alignment(profile: RolloutProfile, overrides: Mapping[str, bool | None] | None = None) -> dict[str, bool]:
    """Every switch with its value: the override, or the profile's default where there is none or it is None.

    Raises:
        UserError: an unknown switch.
    """
    overrides = overrides or {}
    unknown = sorted(set(overrides) - set(SWITCHES))
    if unknown:
        raise UserError(f"policy.dsv4.alignment has unknown keys {unknown}; wanted some of {list(SWITCHES)}")
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return {**profile.alignment, **chosen}


def install_alignment(
    model: nn.Module, profile: RolloutProfile, overrides: Mapping[str, bool | None] | None = None
) -> dict[str, str]:
    """Install the switches that are on. Call it before `install_fake_quant`, once per model.

    Args:
        model: AutoModel `DeepseekV4ForCausalLM` before parallelization.
        profile: the rollout to imitate; gives defaults and the BF16 steps of the expert hidden state.
        overrides: `policy.dsv4.alignment`.

    Returns:
        switch -> "on", "off", or why it has no effect on this model.

    Raises:
        UserError: an unknown switch, or an expert class without seams.
    """
    on = resolve_alignment(profile, overrides)
    modules = dict(model.named_modules())
    gates = [m for m in modules.values() if isinstance(m, Gate | v4_model.DeepseekV4HashGate)]
    found = {name: "on" if value else "off" for name, value in on.items()}
    if on["rope_fp32"]:
        for module in modules.values():
            if isinstance(module, v4_layers.DeepseekV4RotaryEmbedding):
                attach(module, Fp32Rope)
    call = {name: True for name in ("query_norm_fp32", "attention_fp32", "attention_probs_bf16") if on[name]}
    for module in modules.values():
        if isinstance(module, v4_layers.DeepseekV4Attention) and call:
            attach_attention_call(module, **call)
        if isinstance(module, v4_layers.DeepseekV4Compressor) and on["compressor_fp32"]:
            attach(module, Fp32Compressor)
            for owner in (module, *([module.indexer] if module.indexer is not None else [])):
                attach(owner.wkv, EngineWeight)
                attach(owner.wgate, EngineWeight)
            if module.indexer is not None:
                attach(module.indexer.weights_proj, CastsInput)
    for name in ("attention_fp32", "attention_probs_bf16"):
        if any(m.backend.attn == "tilelang" for m in _attentions(modules)):
            found[name] = f"{found[name]}, {'as' if on[name] else 'but'} attn: tilelang computes so by itself"
    if on["hc_mix_fp32"] or on["hc_tf32"] or on["hc_norm_fp32"]:
        blocks = [m for m in modules.values() if isinstance(m, v4_model.DeepseekV4Block)]
        attach_streams(blocks, mix_fp32=on["hc_mix_fp32"], tf32=on["hc_tf32"], norm_fp32=on["hc_norm_fp32"])
    if on["gate_fp32"] or on["routing_weights_fp32"]:
        for gate in gates:
            attach(gate, Fp32Gate, _logits_fp32=on["gate_fp32"], _weights_fp32=on["routing_weights_fp32"])
            if isinstance(gate, Gate):
                gate.router_weights_fp32 = True
    found["routing_weight_after_down"] = _set_routing(modules, on["routing_weight_after_down"])
    if on["silu_bf16_steps"]:
        found["silu_bf16_steps"] = _set_steps(modules, profile)
    if on["logits_bf16"]:
        wrap_function(v4_model, "compute_lm_head_logits", _head)
        attach(model.lm_head, EngineWeight)  # type: ignore[arg-type]
    if on["yarn_on_window_layers"]:
        found["yarn_on_window_layers"] = _set_yarn(model)
    return found


def _attentions(modules: Mapping[str, nn.Module]) -> list[Any]:
    return [m for m in modules.values() if isinstance(m, v4_layers.DeepseekV4Attention)]


def _set_routing(modules: Mapping[str, nn.Module], after_down: bool) -> str:
    stacks = {f"{name}.experts": m.experts for name, m in modules.items() if isinstance(m, MoE)}
    for name, experts in stacks.items():
        if after_down:
            expert_class(experts, name)
        experts.config.apply_router_weight_after_down = after_down  # type: ignore[union-attr]
    if after_down and any(isinstance(experts, GroupedExpertsDeepEP) for experts in stacks.values()):
        return "on; this dispatcher rounds each weighted expert output to BF16 before the sum, the engine after it"
    return "on" if after_down else "off"


def _set_steps(modules: Mapping[str, nn.Module], profile: RolloutProfile) -> str:
    """Give routed and shared experts the profile's steps; AutoModel's own function stays where they are its own."""
    routed, shared = profile.hidden_bf16_steps, profile.shared_hidden_bf16_steps
    for name, module in modules.items():
        if isinstance(module, MoE) and routed != AUTOMODEL_STEPS:
            set_hidden(module.experts, f"{name}.experts", steps=routed)
        elif isinstance(module, MLP) and shared != AUTOMODEL_STEPS:
            set_hidden(module, name, steps=shared)
    return f"on (routed: {', '.join(routed)}; shared: {', '.join(shared)})"


def _set_yarn(model: Any) -> str:
    config = model.config
    if str((config.rope_scaling or {}).get("type", "")).lower() != "yarn":
        return "on, but the model has no YaRN"
    rotary = model.model.rotary_emb
    rotary.window_scaling = config.rope_scaling  # for a model on meta, whose frequencies are computed again
    stretched = v4_layers.DeepseekV4RotaryEmbedding(
        rope_theta=float(config.rope_theta),
        head_dim=int(config.head_dim),
        partial_rotary_factor=float(config.qk_rope_head_dim) / float(config.head_dim),
        rope_scaling=config.rope_scaling,
    )
    with torch.no_grad():
        rotary.inv_freq.copy_(stretched.inv_freq)
    return "on"
