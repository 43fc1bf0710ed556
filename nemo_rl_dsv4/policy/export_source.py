"""What a training checkpoint keeps, beside its weights, of the checkpoint that the run started from.

    source/config.json, tokenizer files    as they were, overrides of the recipe applied
    source/rollout.json                    how the run's rollout rounded the weights

Enough to export the weights where the run was made or, without the source's scales, anywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.folder import copy_other_files, write_text
from nemo_rl_dsv4.model.hf_config import read_config

FOLDER, ROLLOUT = "source", "rollout.json"


@dataclass(frozen=True)
class ExportSource:
    """Where exported weights come from.

    Attributes:
        checkpoint: the folder the run started from, as a path; None for random weights.
        profile: name of the rollout profile.
        weights_rounded: training itself quantized the weights (QAT, FP8), under the profile's own scales.
        precision: `policy.precision`.
    """

    checkpoint: str | None
    profile: str
    weights_rounded: bool
    precision: str


def write_export_source(
    policy_folder: Path, source: ExportSource, hf_config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """Write `source/` into the policy's folder of a training checkpoint (made if it is not there yet).

    Args:
        policy_folder: `step_N/policy`.
        source: what to note down.
        hf_config: config of a model without a checkpoint; not read where there is one.
        overrides: keys that replace those of config.json.

    Raises:
        UserError: the source's config.json cannot be read any more.
        OSError: the files cannot be written.
    """
    folder = Path(policy_folder) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    config = {**hf_config, **overrides}
    if source.checkpoint is not None:
        config = read_config(Path(source.checkpoint), overrides)
        copy_other_files(Path(source.checkpoint), folder)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / ROLLOUT, json.dumps(asdict(source), indent=1) + "\n")


def read_export_source(policy_folder: Path) -> tuple[ExportSource, dict[str, Any]]:
    """Return what `write_export_source` noted down, and the model's config.

    Raises:
        UserError: the folder is of an older version, or damaged.
    """
    folder = Path(policy_folder) / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{policy_folder} does not say which checkpoint it was trained from (no {FOLDER}/ folder; written by an "
            "older version); resume the run for a step, which writes a checkpoint that does"
        )
    try:
        noted = ExportSource(**json.loads((folder / ROLLOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / ROLLOUT} cannot be read ({error}); take another step's checkpoint") from error
    return noted, read_config(folder)
