"""The few numbers of the model that a recipe must fit, read without loading the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.rules_of_values import check_stored_formats
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.hf_config import config_problems
from nemo_rl_dsv4.model.known_models import known_config
from nemo_rl_dsv4.regular_file import require_regular

TINY = "tiny"
CONFIG_OF_MODEL = "config.json of policy.model_name"


@dataclass(frozen=True)
class ModelLimits:
    """What the checkpoint's config.json says; None where it is silent or not on this machine."""

    max_position_embeddings: int | None = None
    n_routed_experts: int | None = None
    num_attention_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = None
    q_lora_rank: int | None = None
    o_lora_rank: int | None = None
    o_groups: int | None = None
    moe_intermediate_size: int | None = None
    vocab_size: int | None = None


def model_limits(config: MasterConfig) -> ModelLimits:
    """Limits of `policy.model_name`, `hf_config_overrides` included.

    A hub id that is neither a folder nor a known model gives no limits: they are checked once the files are there.

    Raises:
        UserError: a folder that does not exist, has no config.json, or a broken one; `tiny` without its settings.
    """
    policy = config.policy
    if policy.model_name == TINY:
        if policy.dsv4.tiny is None:
            raise UserError("policy.model_name is tiny but policy.dsv4.tiny is null; give the tiny model's sizes there")
        values = policy.dsv4.tiny.model_dump()
    else:
        values = model_values(policy.model_name)
    _check_overrides(values, policy.hf_config_overrides)
    values = {**values, **policy.hf_config_overrides}
    if policy.model_name != TINY:
        check_stored_formats(values, f"{policy.model_name}/config.json with policy.hf_config_overrides")
    return ModelLimits(
        **{name: values[name] for name in ModelLimits.__dataclass_fields__ if isinstance(values.get(name), int)}
    )


def _check_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Overrides leave a model that can be built; what is wrong without them is found where the files are read."""
    if not values or not overrides:
        return
    before = set(config_problems(values))
    new = [problem for problem in config_problems({**values, **overrides}) if problem not in before]
    if new:
        message = new[0].removeprefix("config.json: ")
        raise UserError(f"policy.hf_config_overrides {sorted(overrides)} on {CONFIG_OF_MODEL}: {message}")


def model_values(model_name: str) -> dict[str, Any]:
    """`config.json` of a folder, or what is known of a hub id; empty for one that is not known.

    Raises:
        UserError: a path without a readable config.json.
    """
    folder = Path(model_name).expanduser()
    if not folder.exists():
        looks_like_path = model_name.startswith((".", "~", os.sep)) or model_name.count("/") != 1
        if looks_like_path:
            raise UserError(
                f"policy.model_name is {model_name!r}: no such folder; give a checkpoint folder, a hub id or tiny"
            )
        return known_config(model_name) or {}
    file = folder / "config.json"
    try:
        require_regular(file)
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"policy.model_name is {model_name!r}: it holds no config.json, so it is no checkpoint"
        ) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid JSON ({error}); copy the checkpoint again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds a {type(values).__name__}, wanted a mapping")
    return values
