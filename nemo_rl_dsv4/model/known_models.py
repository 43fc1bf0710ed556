"""Shapes of the released DeepSeek-V4 models, so that a recipe naming one can be checked without its files.

The sizes are the defaults of AutoModel 0.7.0's `DeepseekV4Config`, which describes DeepSeek-V4-Flash; compress ratios
of the layers, RoPE scaling and the format of the stored experts are not among those defaults and follow the released
`config.json`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 43

FLASH: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    # Two window-only layers, then ratio 4 (indexed) and 128 in turn.
    "compress_ratios": [0, 0, *((4, 128) * ((LAYERS - 2) // 2)), 4],
    "sliding_window": 128,
    "num_hash_layers": 3,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""DeepSeek-V4-Flash: 284 B parameters, of which a token uses 13 B."""

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "deepseek-ai/DeepSeek-V4-Flash": {**FLASH, "expert_dtype": "fp4"},
    "deepseek-ai/DeepSeek-V4-Flash-0731": {**FLASH, "expert_dtype": "fp4"},
    "deepseek-ai/DeepSeek-V4-Flash-Base": {**FLASH, "expert_dtype": "fp8"},
}
"""Hub id -> official-style `config.json` without the quantization section."""


def known_config(model_name: str) -> dict[str, Any] | None:
    """A copy of the known configuration of a hub id; None for any other name."""
    found = KNOWN_MODELS.get(model_name)
    return None if found is None else dict(found)
