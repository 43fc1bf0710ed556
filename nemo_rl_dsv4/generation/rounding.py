"""The rollout's rounding on transformers' DeepSeek-V4: the second, independent implementation of the profile's sites.

The trainer rounds AutoModel's modules (`nemo_rl_dsv4.model.qat`); the CPU rollout rounds transformers' modules here.
The
two share only `nemo_rl_dsv4.numerics`, so agreement between them is evidence rather than a tautology. Weights are not
rounded here: they arrive as FP8 bytes and scales through the refit exporter and are exact when dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.profiles import RolloutProfile


def _round_first_argument(spec: QuantSpec):
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        return (fake_quant(args[0], spec), *args[1:])

    return hook


def _round_output(spec: QuantSpec):
    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        del module, args
        return fake_quant(output, spec)

    return hook


def _round_query_and_keys(query: QuantSpec | None, keys: QuantSpec | None):
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        q, compressed, *rest = args
        q = q if query is None else fake_quant(q, query)
        compressed = compressed if keys is None or compressed.shape[1] == 0 else fake_quant(compressed, keys)
        return (q, compressed, *rest)

    return hook


def _round_hidden(experts: hf.DeepseekV4Experts, spec: QuantSpec) -> None:
    apply_gate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate  # type: ignore[assignment]

    def rounded(gate_up: torch.Tensor) -> torch.Tensor:
        return fake_quant(apply_gate(gate_up), spec)

    experts._apply_gate = rounded  # type: ignore[method-assign]


def install_rollout_rounding(model: hf.DeepseekV4ForCausalLM, profile: RolloutProfile) -> dict[str, int]:
    """Round activations, KV cache and indexer of a transformers DeepSeek-V4 as `profile` does.

    Args:
        model: transformers `DeepseekV4ForCausalLM`.
        profile: the engine to imitate; sites it leaves unquantized stay as they are.

    Returns:
        site -> number of modules that round there.

    Raises:
        UserError: the model has no module of a kind that every DeepSeek-V4 has (a transformers version with other
        names).
    """
    counts: dict[str, int] = {}
    rope_dim = int(model.config.qk_rope_head_dim)

    def round_inputs(site: str, *modules: nn.Module) -> None:
        spec = profile.site(site)
        if spec is not None:
            for module in modules:
                module.register_forward_pre_hook(_round_first_argument(spec))
                counts[site] = counts.get(site, 0) + 1

    def round_kv(site: str, norm: nn.Module) -> None:
        spec = profile.site(site)
        if spec is not None:
            norm.register_forward_hook(_round_output(replace(spec, keep_last=rope_dim)))
            counts[site] = counts.get(site, 0) + 1

    for module in model.modules():
        if isinstance(module, hf.DeepseekV4Attention):
            round_inputs("linear.input", module.q_a_proj, module.q_b_proj, module.kv_proj, module.o_b_proj)
            round_inputs("o_proj.input", module.o_a_proj)
            round_kv("kv.swa", module.kv_norm)
            if module.compressor is not None:
                round_kv("kv.compressed", module.compressor.kv_norm)
        elif isinstance(module, hf.DeepseekV4Indexer):
            round_inputs("linear.input", module.q_b_proj)
            query, keys = profile.site("indexer.q"), profile.site("indexer.k")
            if query is not None or keys is not None:
                module.scorer.register_forward_pre_hook(_round_query_and_keys(query, keys))
                counts["indexer"] = counts.get("indexer", 0) + 1
        elif isinstance(module, hf.DeepseekV4MLP):
            round_inputs("linear.input", module.gate_proj, module.up_proj, module.down_proj)
        elif isinstance(module, hf.DeepseekV4Experts):
            round_inputs("expert.input", module)
            hidden = profile.site("expert.hidden")
            if hidden is not None:
                _round_hidden(module, hidden)
                counts["expert.hidden"] = counts.get("expert.hidden", 0) + 1
    for site in ("linear.input", "o_proj.input", "kv.swa", "expert.input", "expert.hidden"):
        if profile.site(site) is not None and site not in counts:
            raise UserError(
                f"profile {profile.name} rounds {site}, but {type(model).__name__} has no such module; "
                "the pinned transformers version is 5.18.0"
            )
    return counts
