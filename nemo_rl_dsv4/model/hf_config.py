"""From one official `config.json` dictionary to the configurations of AutoModel and transformers.

The released file keeps RoPE flat (`rope_theta`, `compress_rope_theta`, `rope_scaling`); transformers >= 5.8 saves it
nested (`rope_parameters: {main, compress}`). Both spellings are read, and both models get the same frequencies: sliding
window layers use `rope_theta` without YaRN, compressed layers `compress_rope_theta` with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

if TYPE_CHECKING:
    import torch
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
_POSITIVE_NUMBERS = ("routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hc_eps", "initializer_range")
_DTYPES = tuple(f"{prefix}{name}" for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32"))
_CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "norm_topk_prob": (True,),
    "num_key_value_heads": (1,),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc", None),
    "expert_dtype": ("fp4", "fp8", None),
    "torch_dtype": (*_DTYPES, None),
    "dtype": (*_DTYPES, None),
}
"""Values of optional keys that both models, or the checkpoint's readers, know; null only where it is the default."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LARGEST_SIZE, MOST_LAYERS, MOST_EXPERTS = 2**24, 1024, 2**18
"""Of a size, of layers, and of the routed experts of all layers; V4-Pro has 23,424. Names are listed one by one."""
MOST_SINKHORN_STEPS = 1000
KNOWN_KEYS = (
    *_SIZES,
    *_SHARED_KEYS,
    *("model_type", "compress_ratios", "num_hash_layers", "num_nextn_predict_layers", "expert_dtype", "topk_method"),
    *("rope_theta", "compress_rope_theta", "rope_scaling", "rope_parameters", "quantization_config", "torch_dtype"),
)
"""Keys of config.json that are read here or by the checkpoint's readers."""
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
        for_training: refuse multi-token prediction, see `config_problems`.

    Raises:
        UserError: the file is missing or no JSON object, or every problem of `config_problems`, a line each.
    """
    config = read_config_file(directory, overrides)
    problems = config_problems(config, for_training=for_training)
    if problems:
        raise UserError("\n".join(f"{directory}/{problem}" for problem in problems))
    return config


def read_config_file(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read `config.json` of a checkpoint folder with `overrides` applied; what it says is not checked.

    Raises:
        UserError: the file is missing or no JSON object.
    """
    path = Path(directory) / "config.json"
    try:
        require_regular(path)
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a model configuration ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}; wanted a JSON object")
    return config | dict(overrides or {})


def config_problems(config: Mapping[str, Any], *, for_training: bool = True) -> list[str]:
    """Everything that keeps an official-style config from describing a DeepSeek-V4 this package can build.

    A check that needs keys which are wrong themselves is left out; each message names key, value, and what was wanted.
    """
    found: list[str] = []
    if config.get("model_type") != "deepseek_v4":
        found.append(f"model_type is {config.get('model_type')!r}; wanted 'deepseek_v4'")
    wrong = [key for key in _SIZES if not _is_whole(config.get(key), 1, _most(key))]
    found += [f"{key} is {_short(config.get(key))}; wanted a whole number, 1 to {_most(key)}" for key in wrong]
    found += _optional_problems(config)
    found += [f"{key} is {_short(value)}; wanted a finite number" for key, value in _not_finite(config)]

    def usable(*keys: str) -> bool:
        return not any(key in wrong for key in keys)

    if usable("num_hidden_layers"):
        found += _layer_problems(config, config["num_hidden_layers"])
    if usable("num_attention_heads", "o_groups") and config["num_attention_heads"] % config["o_groups"]:
        found.append(
            f"num_attention_heads {config['num_attention_heads']} is not a multiple of o_groups {config['o_groups']}"
        )
    if usable("num_experts_per_tok", "n_routed_experts") and config["num_experts_per_tok"] > config["n_routed_experts"]:
        found.append(
            f"num_experts_per_tok {config['num_experts_per_tok']} exceeds n_routed_experts {config['n_routed_experts']}"
        )
    if usable("num_hidden_layers", "n_routed_experts"):
        layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
        if layers * experts > MOST_EXPERTS:
            found.append(
                f"n_routed_experts is {experts} in each of {layers} layers; wanted at most {MOST_EXPERTS} in all layers"
            )
    if usable("vocab_size"):
        found += _token_problems(config, config["vocab_size"])
    if usable("head_dim", "qk_rope_head_dim"):
        found += _rope_dim_problems(config["head_dim"], config["qk_rope_head_dim"])
    if config.get("attention_dropout") not in (None, 0):
        found.append(f"attention_dropout is {config['attention_dropout']!r}; wanted 0, since an engine drops nothing")
    predicted = config.get("num_nextn_predict_layers", 0)
    if not _is_whole(predicted, 0, MOST_LAYERS):
        found.append(f"num_nextn_predict_layers is {_short(predicted)}; wanted a whole number, 0 to {MOST_LAYERS}")
    elif for_training and predicted != 0:
        found.append(
            f"num_nextn_predict_layers is {predicted!r}; the policy trains without multi-token prediction, set "
            "policy.hf_config_overrides.num_nextn_predict_layers to 0"
        )
    try:
        rope_settings(config)
    except UserError as error:
        found.append(str(error).removeprefix("config.json: "))
    return [f"config.json: {message}" for message in found]


def validate_config(config: Mapping[str, Any], *, for_training: bool = True) -> None:
    """Check that an official-style config describes a DeepSeek-V4 this package can build.

    Raises:
        UserError: every problem of `config_problems`, a line each: a missing or wrong key, a ratio other than 0, 4,
            128, sizes that do not divide, RoPE settings (`rope_settings`), or (`for_training`) multi-token prediction
            left on.
    """
    problems = config_problems(config, for_training=for_training)
    if problems:
        raise UserError("\n".join(problems))


def _optional_problems(config: Mapping[str, Any]) -> list[str]:
    """Keys with a default in both models, where they are given."""
    found: list[str] = []
    for key, choices in _CHOICES.items():
        value = config.get(key, choices[0])
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            wanted = " or ".join(json.dumps(choice) for choice in choices if choice is not None)
            found.append(f"{key} is {_short(value)}; wanted {wanted}, or leave the key out for the default")
    for key in _POSITIVE_NUMBERS:
        value = config.get(key, 1.0)
        if not _is_number(value, above=0):
            found.append(f"{key} is {_short(value)}; wanted a positive number, or leave the key out for the default")
    steps = config.get("hc_sinkhorn_iters", 1)
    if not _is_whole(steps, 1, MOST_SINKHORN_STEPS):
        found.append(f"hc_sinkhorn_iters is {_short(steps)}; wanted a whole number, 1 to {MOST_SINKHORN_STEPS}")
    return found


def _token_problems(config: Mapping[str, Any], vocabulary: int) -> list[str]:
    """Special tokens are null or in the vocabulary; there may be several that end a text."""
    found: list[str] = []
    for key in _TOKEN_IDS:
        value = config.get(key)
        ids = [] if value is None else [value]
        if key == "eos_token_id" and isinstance(value, list | tuple) and value:
            ids = value
        if not all(_is_whole(token, 0, vocabulary - 1) for token in ids):
            found.append(f"{key} is {_short(value)}; wanted a token of the vocabulary, 0 to {vocabulary - 1}, or null")
    return found


def _not_finite(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Key path and value of each NaN, infinity (which Python's JSON reads) and integer beyond the largest float."""
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _not_finite(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _not_finite(inner, f"{key}[{number}]")


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, above: float) -> bool:
    """Whether this converts to a float above a bound; NaN and infinity are left to `_not_finite`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= above:
        return False
    return isinstance(value, float) or value <= sys.float_info.max


def _most(key: str) -> int:
    return {"num_hidden_layers": MOST_LAYERS, "n_routed_experts": MOST_EXPERTS}.get(key, LARGEST_SIZE)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _layer_problems(config: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of layers: one ratio a layer, and how many choose experts by hash."""
    found: list[str] = []
    ratios, hashed = config.get("compress_ratios"), config.get("num_hash_layers")
    if not isinstance(ratios, list | tuple) or len(ratios) < layers:
        found.append(f"compress_ratios is {_short(ratios)}; wanted one of 0, 4, 128 for each of {layers} layers")
    else:
        wrong = [
            ratio for ratio in ratios[:layers] if not _is_whole(ratio, 0, max(LAYER_TYPES)) or ratio not in LAYER_TYPES
        ]
        found += [f"compress_ratios holds {_short(wrong[0])}; wanted 0, 4 or 128"] if wrong else []
    if not _is_whole(hashed, 0, layers):
        found.append(f"num_hash_layers is {_short(hashed)}; wanted 0 to {layers}")
    return found


def _rope_dim_problems(head: int, rope: int) -> list[str]:
    """Both models recompute the rotary width as int(head_dim * (rope / head_dim)), which can lose one to rounding."""
    if rope % 2 or rope > head or int(head * (rope / head)) != rope:
        return [
            f"qk_rope_head_dim {rope} with head_dim {head}; wanted an even width up to head_dim whose fraction of "
            "head_dim is exact in floating point"
        ]
    return []


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
        if not _is_number(value, above=1):
            raise UserError(f"config.json: {key} is {_short(value)}; wanted a number above 1, the base of the angles")
    assert theta is not None and compress_theta is not None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSettings(float(theta), float(compress_theta), None)
    if kind != "yarn":
        raise UserError(f"config.json: RoPE scaling type is {kind!r}; wanted 'yarn' or 'default'")
    yarn = {"beta_fast": 32, "beta_slow": 1, **{key: scaling[key] for key in _YARN_KEYS if key in scaling}}
    for key in _YARN_KEYS:
        if not _is_number(yarn.get(key), above=0):
            raise UserError(f"config.json: rope_scaling.{key} is {_short(yarn.get(key))}; wanted a positive number")
    return RopeSettings(float(theta), float(compress_theta), yarn)


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    validate_config(config)
    floats = (*_POSITIVE_NUMBERS, "attention_dropout")  # transformers takes no integers for them
    return {
        key: float(config[key]) if key in floats else config[key]
        for key in _SHARED_KEYS
        if config.get(key) is not None or (key in _TOKEN_IDS and key in config)
    }


def automodel_config(config: Mapping[str, Any], dtype: torch.dtype | None = None) -> AutoModelConfig:
    """Make AutoModel 0.7.0's `DeepseekV4Config` from an official-style `config.json` dictionary.

    Args:
        config: keys of the released V4-Flash `config.json`; the quantization keys are not passed on.
        dtype: parameter dtype of the model built from it; None is float32.

    Raises:
        UserError: see `validate_config` and `rope_settings`.
    """
    import torch
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
        dtype=torch.float32 if dtype is None else dtype,
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
