"""A whole DeepSeek-V4, only small: its official-style config.json and random official weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """Every kind of layer (hashed, ratio 0, 4 and 128), with whole and partial 128 blocks."""
    return {
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


@pytest.fixture
def random_official(tiny_config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random float32 weights of `tiny_config` under official names, scaled so that activations stay near one."""
    from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind

    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(tiny_config).items():
        if tensor_kind(name) == "integer":
            weights[name] = torch.randint(0, tiny_config["n_routed_experts"], shape, generator=generator)
        elif "norm" in name or name.endswith("_scale"):
            weights[name] = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return weights
