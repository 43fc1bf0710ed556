"""The rollout's rounding on transformers' DeepSeek-V4: the second, independent implementation of the profile's sites.

The trainer rounds AutoModel's modules (`nemo_rl_dsv4.model.qat`); the CPU rollout rounds transformers' modules here.
The two share only `nemo_rl_dsv4.numerics`, so agreement between them is evidence rather than a tautology. Weights are
not rounded here: they arrive as FP8 bytes and scales through the refit exporter and are exact when dequantized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_numerics import EngineKvNorm, EngineMlp, EngineOutput, EngineScorer, hidden_state
from nemo_rl_dsv4.model.seam import attach
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.profiles import RolloutProfile


def _round_first_argument(spec: QuantSpec):
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        return (fake_quant(args[0], spec), *args[1:])

    return hook


def _round_hidden(experts: Any, spec: QuantSpec | None, profile: RolloutProfile) -> None:
    limit = float(experts.limit) if profile.swiglu_clamp else float("inf")

    def rounded(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden_state(gate, up, spec, limit, profile.hidden_bf16_steps)

    experts._apply_gate = rounded


def install_rollout_rounding(model: hf.DeepseekV4ForCausalLM, profile: RolloutProfile) -> dict[str, int]:
    """Round activations, KV cache and indexer of a transformers DeepSeek-V4 as `profile` does.

    Args:
        model: transformers `DeepseekV4ForCausalLM` after `install_engine_numerics`.
        profile: the engine to imitate; sites it leaves unquantized stay as they are.

    Returns:
        site -> number of modules that round there.

    Raises:
        UserError: the model has no module of a kind that every DeepSeek-V4 has (a transformers version with other
        names).
    """
    counts: dict[str, int] = {}
    rope_dim = int(model.config.qk_rope_head_dim)

    def count(site: str) -> None:
        counts[site] = counts.get(site, 0) + 1

    def round_inputs(site: str, *modules: nn.Module) -> None:
        spec = profile.site(site)
        if spec is not None:
            for module in modules:
                module.register_forward_pre_hook(_round_first_argument(spec))
                count(site)

    def round_kv(site: str, norm: nn.Module) -> None:
        spec = profile.site(site)
        if spec is not None:
            attach(norm, EngineKvNorm, _spec=replace(spec, keep_last=rope_dim))
            count(site)

    def round_output(attention: hf.DeepseekV4Attention) -> None:
        spec = profile.site("o_proj.input")
        if spec is None or profile.o_proj_bf16_after_rope:
            round_inputs("o_proj.input", attention.o_a_proj)
            return
        attention._fused = True  # type: ignore[assignment]
        attach(attention.o_a_proj, EngineOutput, _spec=spec, _heads=attention.num_heads)
        count("o_proj.input")

    for module in list(model.modules()):
        if isinstance(module, hf.DeepseekV4Attention):
            round_inputs("linear.input", module.q_a_proj, module.q_b_proj, module.kv_proj, module.o_b_proj)
            round_output(module)
            round_kv("kv.swa", module.kv_norm)
            if module.compressor is not None:
                round_kv("kv.compressed", module.compressor.kv_norm)
        elif isinstance(module, hf.DeepseekV4Indexer):
            round_inputs("linear.input", module.q_b_proj)
            query, keys = profile.site("indexer.q"), profile.site("indexer.k")
            attach(module.scorer, EngineScorer, _query=query, _keys=keys)
            if query is not None or keys is not None:
                count("indexer")
        elif isinstance(module, hf.DeepseekV4MLP):
            round_inputs("linear.input", module.gate_proj, module.up_proj)
            spec = profile.site("linear.input")
            attach(module, EngineMlp, _spec=spec, _steps=profile.shared_hidden_bf16_steps)
            if spec is not None:
                count("linear.input")
        elif isinstance(module, hf.DeepseekV4Experts):
            round_inputs("expert.input", module)
            hidden = profile.site("expert.hidden")
            _round_hidden(module, hidden, profile)
            if hidden is not None:
                count("expert.hidden")
    for site in ("linear.input", "o_proj.input", "kv.swa", "expert.input", "expert.hidden"):
        if profile.site(site) is not None and site not in counts:
            raise UserError(
                f"profile {profile.name} rounds {site}, but {type(model).__name__} has no such module; "
                "the pinned transformers version is 5.18.0"
            )
    return counts
