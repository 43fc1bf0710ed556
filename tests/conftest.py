"""A whole DeepSeek-V4, only small: its official-style config.json and random weights, made once a session."""

from __future__ import annotations

import copy
import gc
import os
import sys
from typing import Any

# As in the CPU workers: AutoModel compiles small functions, which costs more on a CPU than it saves, and contended
# threads are slow. A test that wants the compiler takes the variable away.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start dozens of Python processes. Where the environment forbids bytecode, as container images do, each of them
# would compile the sources of torch and of all other libraries again, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

sys.dont_write_bytecode = False

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 160,
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 0, 4, 128, 4],
    "sliding_window": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Every kind of layer (hashed, ratio 0, 4 and 128), with whole and partial 128 blocks."""


def pytest_collection_finish() -> None:
    """What importing left behind stays: the collector does not look at these millions of objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return copy.deepcopy(TINY_CONFIG)


@pytest.fixture(scope="session")
def config_once() -> dict[str, Any]:
    """The config behind `tiny_config`; do not change it in a test."""
    return TINY_CONFIG


@pytest.fixture(scope="session")
def official_once() -> dict[str, torch.Tensor]:
    """The weights behind `random_official`; do not change them in a test."""
    from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind

    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(TINY_CONFIG).items():
        if tensor_kind(name) == "integer":
            weights[name] = torch.randint(0, TINY_CONFIG["n_routed_experts"], shape, generator=generator)
        elif "norm" in name or name.endswith("_scale"):
            weights[name] = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return weights


@pytest.fixture(scope="session")
def training_once(official_once: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights behind `training_state`; do not change them in a test."""
    from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL

    state: dict[str, torch.Tensor] = {}
    for name, value in official_once.items():
        slot = AUTOMODEL.slot(name)
        if slot.expert is None:
            state[slot.key] = value
            continue
        if slot.key not in state:
            state[slot.key] = torch.empty(AUTOMODEL.stack_shape(value.shape, slot, TINY_CONFIG["n_routed_experts"]))
        AUTOMODEL.view(state[slot.key], slot).copy_(value)
    return state


@pytest.fixture
def random_official(official_once: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random float32 weights of `tiny_config` under official names, scaled so that activations stay near one."""
    return {name: value.clone() for name, value in official_once.items()}


@pytest.fixture
def training_state(training_once: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under AutoModel's names, experts stacked."""
    return {key: value.clone() for key, value in training_once.items()}
