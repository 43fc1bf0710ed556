"""Settings that only work together, as one group: what a recipe may not say with two keys.

Each pair holds whatever the profile, the runtime and the machine are; what a profile asks of the engine is in
`nemo_rl_dsv4.generation.vllm_settings`, which `rules_of_rollout` applies. docs/recipes.md shows the group as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY, model_values
from nemo_rl_dsv4.config.rules import require
from nemo_rl_dsv4.generation.rollout_facts import FACTS, named_profile

ENGINE = "policy.generation.vllm_cfg"
ARGUMENTS = "policy.generation.vllm_kwargs"
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
PROFILE = "policy.dsv4.rollout_profile"
ATTENTION = {
    "FLASHMLA_SPARSE_DSV4": ("vllm-hopper", "vllm-blackwell"),
    "FLASHMLA_SPARSE": ("vllm-hopper", "vllm-blackwell"),
    "FLASHINFER_MLA_SPARSE_DSV4": ("vllm-blackwell",),
    "ROCM_FLASHMLA_SPARSE_DSV4": ("vllm-rocm-gfx950", "vllm-rocm-gfx950-bf16", "vllm-rocm-gfx942"),
}
"""Attention backend that vLLM 0.26.0 has for DeepSeek-V4 (`vllm/models/deepseek_v4`) -> profiles of its GPUs."""


class Contradiction(NamedTuple):
    """Two keys with their values as text, and what to do."""

    left: str
    left_value: object
    right: str
    right_value: object
    fix: str

    def __str__(self) -> str:
        left, right = _text(self.left_value), _text(self.right_value)
        return f"{self.left} is {left} but {self.right} is {right}: {self.fix}"


def check_agreement(config: MasterConfig) -> None:
    """Raises UserError with the first pair of keys that contradict each other."""
    for found in contradictions(config):
        require(False, str(found))


def contradictions(config: MasterConfig) -> Iterator[Contradiction]:
    """Every pair of keys of the group that contradict each other, in the order of `RULES`."""
    for rule in RULES:
        yield from rule(config)


def _rounding(config: MasterConfig) -> Iterator[Contradiction]:
    """What training rounds on purpose, the rollout rounds."""
    dsv4 = config.policy.dsv4
    name = _profile(config)
    if name is None:
        return
    facts = FACTS[name]
    if not facts.quantized and facts.fp8_kv and dsv4.train_mode != "bf16":
        fix = "its products are not quantized; set train_mode to bf16 with policy.dsv4.fake_quant.kv and indexer true"
        yield Contradiction("policy.dsv4.train_mode", dsv4.train_mode, PROFILE, dsv4.rollout_profile, fix)
    rounded = {
        **dict.fromkeys(("weights", "linear_inputs", "experts"), facts.quantized),
        "o_proj": facts.fp8_o_proj,
        **dict.fromkeys(("kv", "indexer"), facts.fp8_kv),
    }
    for flag, in_rollout in rounded.items():
        if getattr(dsv4.fake_quant, flag) and not in_rollout:
            fix = f"that rollout ({name}) does not round it; set the flag to null or false"
            yield Contradiction(f"policy.dsv4.fake_quant.{flag}", True, PROFILE, dsv4.rollout_profile, fix)


def _scales(config: MasterConfig) -> Iterator[Contradiction]:
    """E8M0 scales need DeepGEMM and powers of two on both sides."""
    engine = config.policy.generation.vllm_cfg
    variable = f"{ENGINE}.env_vars.{E8M0}"
    value = engine.env_vars.get(E8M0)
    if value is None:
        return
    if _on(value) and not engine.use_deep_gemm:
        fix = "only DeepGEMM has E8M0 scales; drop the variable or set use_deep_gemm to true"
        yield Contradiction(variable, value, f"{ENGINE}.use_deep_gemm", False, fix)
    for key in ("pow2_weight_scaling_factors", "pow2_activation_scaling_factors"):
        if _on(value) and not getattr(engine, key):
            fix = "E8M0 scales are powers of two; set the key to true"
            yield Contradiction(variable, value, f"{ENGINE}.{key}", False, fix)
    if not _on(value) and engine.pow2_activation_scaling_factors:
        fix = "without E8M0 activation scales are not powers of two; change one of them"
        yield Contradiction(variable, value, f"{ENGINE}.pow2_activation_scaling_factors", True, fix)


def _experts(config: MasterConfig) -> Iterator[Contradiction]:
    """An FP8 refit needs engines that were built with FP8 experts: vLLM keeps the layout it starts with.

    The trainer must read a release as FP8 as well. That the engines' folder holds FP8 experts is checked once it is
    there (`check_served_model`).
    """
    policy = config.policy
    name = _profile(config)
    if policy.generation.vllm_cfg.precision != "fp8" or (name is not None and not FACTS[name].quantized):
        return
    fix = "experts are refitted in FP8 blocks of 128 x 128, and vLLM keeps the layout it starts with; set "
    precision = f"{ENGINE}.precision"
    if policy.model_name == TINY:
        if policy.dsv4.tiny is not None and policy.dsv4.tiny.expert_format != "fp8":
            key = "policy.dsv4.tiny.expert_format"
            yield Contradiction(key, policy.dsv4.tiny.expert_format, precision, "fp8", f"{fix}expert_format to fp8")
        return
    found = {**model_values(policy.model_name), **policy.hf_config_overrides}.get("expert_dtype")
    if found is not None and found != "fp8":
        key = "policy.hf_config_overrides.expert_dtype"
        where = key if "expert_dtype" in policy.hf_config_overrides else f"expert_dtype of {policy.model_name}"
        yield Contradiction(where, found, precision, "fp8", f"{fix}{key} to fp8")


def _tokenizers(config: MasterConfig) -> Iterator[Contradiction]:
    """Trainer and engine spell prompts alike."""
    policy = config.policy
    mode = policy.generation.vllm_kwargs.get("tokenizer_mode", "auto")
    template = policy.tokenizer.chat_template
    wanted = ("deepseek_v4", "auto") if policy.model_name == TINY else ("deepseek_v4",)
    if template == "deepseek_v4" and mode not in wanted:
        fix = "vLLM would encode chats by another rule; set tokenizer_mode to deepseek_v4"
        yield Contradiction("policy.tokenizer.chat_template", template, f"{ARGUMENTS}.tokenizer_mode", mode, fix)


def _cache(config: MasterConfig) -> Iterator[Contradiction]:
    """The attention backend is DeepSeek-V4's, runs on the profile's GPU, and holds an FP8 cache."""
    generation = config.policy.generation
    for key, name in (
        (f"{ARGUMENTS}.attention_backend", generation.vllm_kwargs.get("attention_backend")),
        (f"{ARGUMENTS}.attention_config.backend", _nested(generation.vllm_kwargs.get("attention_config"), "backend")),
    ):
        if not isinstance(name, str):
            continue
        dtype, profile = generation.vllm_cfg.kv_cache_dtype, _profile(config)
        if name not in ATTENTION:
            fix = f"DeepSeek-V4's cache wants one of {', '.join(ATTENTION)}; change one of them, or drop the backend"
            yield Contradiction(key, name, f"{ENGINE}.kv_cache_dtype", dtype, fix)
        elif profile in FACTS and profile != "bf16" and profile not in ATTENTION[name]:
            fix = f"that backend is for {' and '.join(ATTENTION[name])} ({profile} was asked for); drop the backend"
            yield Contradiction(key, name, PROFILE, config.policy.dsv4.rollout_profile, fix)


def _engine_layout(config: MasterConfig) -> Iterator[Contradiction]:
    """vLLM spreads experts over all tensor-parallel ranks or over none."""
    engine = config.policy.generation.vllm_cfg
    tensor, expert = engine.tensor_parallel_size, engine.expert_parallel_size
    if 1 < expert < tensor:
        fix = f"vLLM's expert ranks are its tensor ranks; set expert_parallel_size to 1 or {tensor}"
        yield Contradiction(f"{ENGINE}.expert_parallel_size", expert, f"{ENGINE}.tensor_parallel_size", tensor, fix)


def _graphs(config: MasterConfig) -> Iterator[Contradiction]:
    """Captured graphs replay the addresses they were captured with; refits of FP8 scales may replace tensors."""
    engine = config.policy.generation.vllm_cfg
    if not engine.enforce_eager:
        fix = (
            "refits under captured CUDA graphs are not verified, and graphs that replay freed scales give other "
            "log-probabilities without an error; set enforce_eager to true"
        )
        yield Contradiction(f"{ENGINE}.enforce_eager", False, f"{ENGINE}.precision", engine.precision, fix)


def _only_vllm(rule: Callable[[MasterConfig], Iterator[Contradiction]]):
    def of_engine(config: MasterConfig) -> Iterator[Contradiction]:
        if config.policy.generation.backend == "vllm":
            yield from rule(config)

    return of_engine


RULES = (_rounding, *map(_only_vllm, (_scales, _experts, _tokenizers, _cache, _engine_layout, _graphs)))
"""Functions that give the contradictions of a recipe."""


def _profile(config: MasterConfig) -> str | None:
    """The named profile, or the one that the recipe's GPU implies; None where only the worker knows."""
    dsv4 = config.policy.dsv4
    return named_profile(dsv4.rollout_profile, dsv4.gpu)


def _nested(section: object, key: str) -> object:
    return section.get(key) if isinstance(section, dict) else None


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
