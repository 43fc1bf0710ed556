"""The group of settings that must agree: each pair once, on recipes that are right without the change."""

from functools import cache
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config.rules_of_agreement import RULES, contradictions
from nemo_rl_dsv4.errors import UserError

RECIPES = Path(__file__).parents[3] / "examples" / "configs" / "recipes" / "llm"
HOPPER = "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128-qat"
ROCM = "grpo-deepseek-v4-flash-0731-4n8g-mi355x-automodel"
MINI = "grpo-dsv4-mini-1n1g-automodel-qat"
ENGINE, KWARGS = "policy.generation.vllm_cfg", "policy.generation.vllm_kwargs"


@cache
def recipe(name, *overrides):
    return load_config(RECIPES / f"{name}.yaml", ["runtime=embedded", *overrides])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_contradicts_itself(path):
    assert list(contradictions(recipe(path.stem))) == []


PAIRS = {
    "E8M0 without DeepGEMM": (
        ROCM + "-qat",
        [f"+{ENGINE}.env_vars.VLLM_USE_DEEP_GEMM_E8M0='1'"],
        ("env_vars.VLLM_USE_DEEP_GEMM_E8M0 is 1", "use_deep_gemm is false"),
    ),
    "no E8M0 with powers of two": (
        HOPPER,
        [f"{ENGINE}.env_vars.VLLM_USE_DEEP_GEMM_E8M0='0'"],
        ("env_vars.VLLM_USE_DEEP_GEMM_E8M0 is 0", "pow2_activation_scaling_factors is true"),
    ),
    "E8M0 with float weight scales": (
        HOPPER,
        [f"{ENGINE}.pow2_weight_scaling_factors=false"],
        ("VLLM_USE_DEEP_GEMM_E8M0 is 1", "pow2_weight_scaling_factors is false"),
    ),
    "FP4 experts under an FP8 refit": (
        HOPPER,
        ["policy.hf_config_overrides.expert_dtype=fp4"],
        ("policy.hf_config_overrides.expert_dtype is fp4", "vllm_cfg.precision is fp8"),
    ),
    "the release's FP4 experts": (
        HOPPER,
        ["~policy.hf_config_overrides.expert_dtype"],
        ("expert_dtype of deepseek-ai/DeepSeek-V4-Flash-0731 is fp4", "vllm_cfg.precision is fp8"),
    ),
    "the mini model's FP4 experts": (
        MINI,
        ["policy.dsv4.tiny.expert_format=fp4"],
        ("policy.dsv4.tiny.expert_format is fp4", "vllm_cfg.precision is fp8"),
    ),
    "another tokenizer mode": (
        HOPPER,
        [f"{KWARGS}.tokenizer_mode=mistral"],
        ("policy.tokenizer.chat_template is deepseek_v4", "vllm_kwargs.tokenizer_mode is mistral"),
    ),
    "an attention backend of another model": (
        HOPPER,
        [f"{KWARGS}.attention_backend=FLASH_ATTN"],
        ("vllm_kwargs.attention_backend is FLASH_ATTN", "kv_cache_dtype is fp8_ds_mla"),
    ),
    "an attention backend of another GPU": (
        ROCM + "-qat",
        [f"+{KWARGS}.attention_config={{backend:FLASHMLA_SPARSE_DSV4}}"],
        ("attention_config.backend is FLASHMLA_SPARSE_DSV4", "rollout_profile is vllm-rocm-gfx950"),
    ),
    "some tensor ranks for experts": (
        HOPPER,
        [f"{ENGINE}.expert_parallel_size=4"],
        ("expert_parallel_size is 4", "tensor_parallel_size is 8"),
    ),
    "captured graphs": (HOPPER, [f"{ENGINE}.enforce_eager=false"], ("enforce_eager is false", "precision is fp8")),
    "rounding what ROCm leaves alone": (
        ROCM + "-qat",
        ["policy.dsv4.fake_quant.o_proj=true"],
        ("fake_quant.o_proj is true", "rollout_profile is vllm-rocm-gfx950"),
    ),
    "rounding a cache that is BF16": (
        "grpo-dsv4-tiny-1n0g-automodel-bf16",
        ["policy.dsv4.rollout_profile=bf16", "policy.dsv4.fake_quant.kv=true"],
        ("fake_quant.kv is true", "rollout_profile is bf16"),
    ),
    "QAT against BF16 products": (
        ROCM + "-bf16",
        ["policy.dsv4.train_mode=qat"],
        ("train_mode is qat", "rollout_profile is vllm-rocm-gfx950-bf16"),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_that_contradicts_is_named_and_refused(case):
    """C089 for the layout, C043 for captured graphs, C032 for experts, C083 for the chat encoding."""
    name, overrides, keys = PAIRS[case]
    config = recipe(name, *overrides)
    found = [str(pair) for pair in contradictions(config)]
    assert [text for text in found if all(key in text for key in keys)], found
    with pytest.raises(UserError):
        validate(config, runs_here=False)


def test_every_rule_of_the_group_can_fail():
    """No rule is there for show: the pairs above reach all of them."""
    reached = {
        index
        for name, overrides, _ in PAIRS.values()
        for index, rule in enumerate(RULES)
        if list(rule(recipe(name, *overrides)))
    }
    assert reached == set(range(len(RULES)))
