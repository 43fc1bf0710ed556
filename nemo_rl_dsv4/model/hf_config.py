"""From one official `config.json` dictionary to the configurations of AutoModel and transformers.

The released file keeps RoPE flat (`rope_theta`, `compress_rope_theta`, `rope_scaling`); transformers >= 5.8 saves it
nested (`rope_parameters: {main, compress}`). Both spellings are read, and both models get the same frequencies: sliding
window layers use `rope_theta` without YaRN, compressed layers `compress_rope_theta` with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_dsv4.errors import UserError

if TYPE_CHECKING:
    from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config as AutoModelConfig
    from transformers.models.deepseek_v4 import DeepseekV4Config as TransformersConfig

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""transformers' layer type of each official compress ratio."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "sliding_window",
    "hc_mult",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
)
_SHARED_KEYS = (
    *(key for key in _SIZES if key != "qk_rope_head_dim"),
    "num_key_value_heads",
    "routed_scaling_factor",
    "norm_topk_prob",
    "scoring_func",
    "hidden_act",
    "swiglu_limit",
    "hc_eps",
    "hc_sinkhorn_iters",
    "rms_norm_eps",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_bias",
    "attention_dropout",
    "tie_word_embeddings",
)
_OPTIONAL_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hc_eps", "initializer_range"), (int, float)
    ),
    **dict.fromkeys(("scoring_func", "hidden_act"), str),
    "norm_topk_prob": bool,
}
"""Keys with a default in both models, which a null would bypass in one of them."""
_ABSENT = object()
_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


@dataclass(frozen=True)
class RopeSettings:
    """RoPE of both kinds of layer; `yarn` is None or its factor, original length and betas."""

    theta: float
    compress_theta: float
    yarn: Mapping[str, float] | None


def read_config(
    directory: Path, overrides: Mapping[str, Any] | None = None, *, for_training: bool = True
) -> dict[str, Any]:
    """Read and validate `config.json` of a checkpoint folder, `overrides` (recipe `hf_config_overrides`) applied first.

    Args:
        directory: the checkpoint folder.
        overrides: values that replace those of the file.
        for_training: refuse multi-token prediction, see `validate_config`.

    Raises:
        UserError: the file is missing or no JSON object, or see `validate_config` and `rope_settings`.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a model configuration ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}; wanted a JSON object")
    config.update(overrides or {})
    validate_config(config, for_training=for_training)
    rope_settings(config)
    return config


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}; wanted a positive integer")
    return value


def validate_config(config: Mapping[str, Any], *, for_training: bool = True) -> None:
    """Check that an official-style config describes a DeepSeek-V4 this package can build.

    Raises:
        UserError: a missing or wrong key, a ratio other than 0, 4, 128, sizes that do not divide, or (`for_training`)
            multi-token prediction left on.
    """
    if config.get("model_type") != "deepseek_v4":
        raise UserError(f"config.json: model_type is {config.get('model_type')!r}; wanted 'deepseek_v4'")
    for key in _SIZES:
        _positive(config, key)
    for key, kind in _OPTIONAL_KEYS.items():
        value = config.get(key, _ABSENT)
        if value is not _ABSENT and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            wanted = "true or false" if kind is bool else "text" if kind is str else "a number"
            raise UserError(f"config.json: {key} is {value!r}; wanted {wanted}, or leave the key out for the default")
    layers = config["num_hidden_layers"]
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list | tuple) or len(ratios) < layers:
        raise UserError(
            f"config.json: compress_ratios is {ratios!r}; wanted one of 0, 4, 128 for each of {layers} layers"
        )
    wrong = [r for r in ratios[:layers] if isinstance(r, bool) or not isinstance(r, int) or r not in LAYER_TYPES]
    if wrong:
        raise UserError(f"config.json: compress_ratios holds {wrong[0]!r}; wanted 0, 4 or 128")
    hash_layers = config.get("num_hash_layers")
    if isinstance(hash_layers, bool) or not isinstance(hash_layers, int) or not 0 <= hash_layers <= layers:
        raise UserError(f"config.json: num_hash_layers is {hash_layers!r}; wanted 0 to {layers}")
    if config["num_attention_heads"] % config["o_groups"]:
        raise UserError(
            f"config.json: num_attention_heads {config['num_attention_heads']} is not a multiple of o_groups "
            f"{config['o_groups']}"
        )
    if config["num_experts_per_tok"] > config["n_routed_experts"]:
        raise UserError(
            f"config.json: num_experts_per_tok {config['num_experts_per_tok']} exceeds n_routed_experts "
            f"{config['n_routed_experts']}"
        )
    _check_rope_dim(config)
    if config.get("tie_word_embeddings"):
        raise UserError("config.json: tie_word_embeddings is true; DeepSeek-V4 has its own head, set it to false")
    predicted = config.get("num_nextn_predict_layers", 0)
    if isinstance(predicted, bool) or not isinstance(predicted, int) or predicted < 0:
        raise UserError(f"config.json: num_nextn_predict_layers is {predicted!r}; wanted 0 or a positive integer")
    if for_training and predicted != 0:
        raise UserError(
            f"config.json: num_nextn_predict_layers is {config['num_nextn_predict_layers']!r}; the policy trains "
            "without multi-token prediction, set policy.hf_config_overrides.num_nextn_predict_layers to 0"
        )


def _check_rope_dim(config: Mapping[str, Any]) -> None:
    """Both models recompute the rotary width as int(head_dim * (rope / head_dim)), which can lose one to rounding."""
    head, rope = config["head_dim"], config["qk_rope_head_dim"]
    if rope % 2 or rope > head or int(head * (rope / head)) != rope:
        raise UserError(
            f"config.json: qk_rope_head_dim {rope} with head_dim {head}; wanted an even width up to head_dim whose "
            "fraction of head_dim is exact in floating point"
        )


def rope_settings(config: Mapping[str, Any]) -> RopeSettings:
    """Read RoPE from the flat (released) or nested (transformers) spelling.

    Raises:
        UserError: a scaling type other than YaRN, or YaRN without its factor or original length.
    """
    nested = config.get("rope_parameters")
    for key, value in (("rope_parameters", nested), ("rope_scaling", config.get("rope_scaling"))):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"config.json: {key} is {value!r}; wanted an object")
    if isinstance(nested, Mapping) and isinstance(nested.get("compress"), Mapping):
        main, scaling = nested.get("main"), nested["compress"]
        main = main if isinstance(main, Mapping) else {}
        theta = main.get("rope_theta", config.get("rope_theta"))
        compress_theta = scaling.get("rope_theta", config.get("compress_rope_theta"))
    else:
        theta, compress_theta = config.get("rope_theta"), config.get("compress_rope_theta")
        scaling = config.get("rope_scaling") or nested or {}
    for key, value in (("rope_theta", theta), ("compress_rope_theta", compress_theta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"config.json: {key} is {value!r}; wanted a positive number")
    assert theta is not None and compress_theta is not None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSettings(float(theta), float(compress_theta), None)
    if kind != "yarn":
        raise UserError(f"config.json: RoPE scaling type is {kind!r}; wanted 'yarn' or 'default'")
    yarn = {"beta_fast": 32, "beta_slow": 1, **{key: scaling[key] for key in _YARN_KEYS if key in scaling}}
    for key in _YARN_KEYS:
        if not isinstance(yarn.get(key), int | float) or yarn[key] <= 0:
            raise UserError(f"config.json: rope_scaling.{key} is {yarn.get(key)!r}; wanted a positive number")
    return RopeSettings(float(theta), float(compress_theta), yarn)


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    validate_config(config)
    return {key: config[key] for key in _SHARED_KEYS if key in config}


def automodel_config(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> AutoModelConfig:
    """Make AutoModel 0.7.0's `DeepseekV4Config` from an official-style `config.json` dictionary.

    Args:
        config: keys of the released V4-Flash `config.json`; the quantization keys are not passed on.
        dtype: parameter dtype of the model built from it.

    Raises:
        UserError: see `validate_config` and `rope_settings`.
    """
    from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config

    fields, rope = _shared(config), rope_settings(config)
    return DeepseekV4Config(
        **fields,
        qk_rope_head_dim=config["qk_rope_head_dim"],
        compress_ratios=list(config["compress_ratios"][: config["num_hidden_layers"]]),
        num_hash_layers=config["num_hash_layers"],
        num_nextn_predict_layers=0,
        rope_theta=rope.theta,
        compress_rope_theta=rope.compress_theta,
        rope_scaling={"type": "yarn", **rope.yarn} if rope.yarn else None,
        dtype=dtype,
    )


def transformers_config(config: Mapping[str, Any]) -> TransformersConfig:
    """Make transformers 5.18's `DeepseekV4Config` from an official-style `config.json` dictionary.

    The model built from it is float32 and attends eagerly, the only implementation transformers has for V4's sinks.

    Raises:
        UserError: see `validate_config` and `rope_settings`.
    """
    from transformers.models.deepseek_v4 import DeepseekV4Config

    fields, rope = _shared(config), rope_settings(config)
    layers, hashed = config["num_hidden_layers"], config["num_hash_layers"]
    partial = config["qk_rope_head_dim"] / config["head_dim"]
    compress: dict[str, Any] = {"rope_type": "default"}
    if rope.yarn:
        # The reference scales no cos/sin; an absent attention_factor would be derived as 0.1 ln(factor) + 1.
        compress = {"rope_type": "yarn", "attention_factor": 1.0, **rope.yarn}
    return DeepseekV4Config(
        **fields,
        layer_types=[LAYER_TYPES[ratio] for ratio in config["compress_ratios"][:layers]],
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        partial_rotary_factor=partial,
        num_nextn_predict_layers=0,
        rope_theta=rope.theta,
        compress_rope_theta=rope.compress_theta,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": partial},
            "compress": {**compress, "rope_theta": rope.compress_theta, "partial_rotary_factor": partial},
        },
    )
