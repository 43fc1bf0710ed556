"""Tell a training checkpoint from a released one, and find a run's last whole step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import INFO, MANIFEST, POLICY, last_whole_checkpoint, read_checkpoint
from nemo_rl_dsv4.regular_file import require_regular
from nemo_rl_dsv4.utils.run_folder import CONFIG_FILE, METRICS_FILE, checkpoint_folder

if TYPE_CHECKING:
    from rich.console import Console

TORCH_METADATA = ".metadata"
"""Of torch's distributed checkpoints."""


def what_training_left(folder: Path) -> tuple[str, Path] | None:
    """What a folder is that `find_step` takes for a step or for a run's steps, in words, and what to export.

    None for any other folder.
    """
    if (folder / "config.json").is_file():
        return None
    if _is_step(folder):
        return "is a training checkpoint", folder
    if _is_policy(folder):
        return "is the policy of a training checkpoint", folder.resolve().parent
    return ("holds training checkpoints", folder) if _has_steps(folder) else None


def find_step(source: Path, console: Console) -> Path | None:
    """The step folder that `source` names, its files checked against the manifest; None for any other folder.

    Args:
        source: a `step_N` folder, its `policy`, the folder that holds a run's steps, or the run's own folder
            (config.yaml and metrics.jsonl), whose recipe says where its checkpoints are.
        console: where damaged steps that were passed over are named.

    Raises:
        UserError: a damaged step, or a run without a whole one.
    """
    if not source.is_dir():
        raise UserError(f"{source} is no folder; give a checkpoint, a run's step_N folder, or a run's folder")
    if (source / "config.json").is_file():
        return None
    if _is_policy(source) and _is_step(source.resolve().parent):
        source = source.resolve().parent
    if _is_step(source):
        console.print(f"checking the files of {source} against their hashes", highlight=False, soft_wrap=True)
        read_checkpoint(source)
        return source
    steps = source
    if not _has_steps(source):
        if not (source / CONFIG_FILE).is_file() or not (source / METRICS_FILE).is_file():
            return None
        steps = _checkpoints_of(source)
    console.print(f"looking for the last whole checkpoint in {steps}", highlight=False, soft_wrap=True)
    step, damaged = last_whole_checkpoint(steps)
    for message in damaged:
        console.print(f"passed over: {message}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"taking {step}", highlight=False, soft_wrap=True)
    return step


def _is_step(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST, INFO, POLICY))


def _is_policy(folder: Path) -> bool:
    return (folder / TORCH_METADATA).is_file()


def _has_steps(folder: Path) -> bool:
    return any(path.name.removeprefix("step_").isdecimal() for path in folder.glob("step_*"))


def _checkpoints_of(run: Path) -> Path:
    """Where a run's recipe puts its checkpoints; a relative folder is one of the current directory."""
    try:
        require_regular(run / CONFIG_FILE)
        recipe = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
        folder = checkpoint_folder(recipe["checkpointing"]["checkpoint_dir"], run)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{run / CONFIG_FILE}: cannot be read as the recipe of a run ({error})") from error
    if not _has_steps(folder):
        raise UserError(
            f"{run}: its checkpoints should be in {folder} (checkpointing.checkpoint_dir), where there are none; give "
            "their folder, or start this in the directory where the run was started"
        )
    return folder
