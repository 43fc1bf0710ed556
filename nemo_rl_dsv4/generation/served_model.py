"""What a vLLM engine reads from the folder that it serves, against what the trainer computes with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.hf_config import read_config_file

WINDOW_YARN_UNTIL = (0, 30)
"""The first vLLM that applies no YaRN on layers without compression."""

TRAINER_ONLY = ("num_nextn_predict_layers", "expert_dtype", "attention_dropout")
"""Keys of config.json that an engine does not compute with, or that are checked by themselves."""


def check_window_yarn(version: str, trainer: bool, served: Mapping[str, Any]) -> None:
    """Refuse a vLLM whose ratio-0 layers have other frequencies than the trainer's.

    Args:
        version: of vLLM.
        trainer: whether the trainer applies YaRN there.
        served: the engine's config.json.

    Raises:
        UserError: one of the two applies YaRN and the other does not.
    """
    scaling = served.get("rope_scaling") or {}
    engine = tuple(int(part) for part in version.split(".")[:2]) < WINDOW_YARN_UNTIL
    if str(scaling.get("type", scaling.get("rope_type", ""))).lower() == "yarn" and engine != trainer:
        raise UserError(
            f"vLLM {version} applies {'YaRN' if engine else 'no YaRN'} on layers without compression, and the trainer "
            f"{'does' if trainer else 'does not'}; set policy.dsv4.alignment.yarn_on_window_layers to "
            f"{str(engine).lower()}"
        )


def check_served_model(folder: Path, overrides: Mapping[str, Any], *, quantized: bool) -> None:
    """An engine reads config.json of the folder it serves, which the trainer's overrides do not reach.

    Args:
        folder: of the checkpoint that engines start with.
        overrides: `policy.hf_config_overrides`.
        quantized: the rollout is FP8, and refits send FP8 experts.

    Raises:
        UserError: an override that makes the trainer another model, or experts that no refit can replace.
    """
    served, where = read_config_file(folder), Path(folder) / "config.json"
    for key, value in overrides.items():
        if key not in TRAINER_ONLY and served.get(key) != value:
            raise UserError(
                f"policy.hf_config_overrides.{key} is {value!r}, but {where}, which a vLLM engine reads, has "
                f"{served.get(key)!r}: trainer and rollout would be two models; write the value into config.json of a "
                "copy of that folder, or drop it"
            )
    experts = served.get("expert_dtype")
    if quantized and experts not in (None, "fp8"):
        raise UserError(
            f"expert_dtype of {where} is {experts!r}; wanted fp8, since vLLM keeps the expert layout that it starts "
            f"with and refits send FP8: run `nemo-rl-dsv4 convert {folder} DST --to fp8`, then set "
            "policy.model_name=DST"
        )
