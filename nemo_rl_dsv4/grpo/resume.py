"""What a checkpoint holds besides the policy, and how a run is put back there."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import POLICY, read_checkpoint
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.protocols import Loader, Policy
from nemo_rl_dsv4.grpo.rollout_source import Position
from nemo_rl_dsv4.grpo.settings import TrainerSettings
from nemo_rl_dsv4.utils.random_state import restore_rng_state, rng_state

log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """How far a run is."""

    step: int = 0
    """Steps done."""
    consumed_samples: int = 0
    """Prompts trained on."""
    total_valid_tokens: float = 0.0
    """Response tokens trained on."""


def training_info(
    state: TrainingState, loader: Loader | Position, logged: dict[str, float], settings: TrainerSettings
) -> dict[str, Any]:
    """What a resumed run needs besides the policy, and the metrics of the step (those that are finite).

    Raises:
        UserError: checkpointing.metric_name is no metric of this run.
    """
    info: dict[str, Any] = {
        "step": state.step,
        "total_steps": state.step,
        "current_epoch": loader.epoch,
        "consumed_samples": state.consumed_samples,
        "total_valid_tokens": state.total_valid_tokens,
        "seed": settings.grpo.seed,
        "loader": loader.state_dict(),
        "rng": rng_state(),
        "metrics": {name: value for name, value in logged.items() if math.isfinite(value)},
    }
    name = settings.checkpointing.metric_name
    if name is not None:
        kind, metric = name.split(":", 1)
        key = f"{'validation' if kind == 'val' else 'train'}/{metric}"
        if key in info["metrics"]:
            info[name] = info["metrics"][key]
        elif kind == "train" or any(key.startswith("validation/") for key in info["metrics"]):
            raise UserError(f"checkpointing.metric_name is {name!r}, but this step reports no {key}")
    return info


def restore(
    policy: Policy, loader: Loader, checkpoints: CheckpointStore | None, resume_from: Path | None
) -> TrainingState:
    """Start anew, or put policy, loader and random state back to where the checkpoint was written.

    Raises:
        UserError: the checkpoint is damaged, or a new run would mix with an old one's checkpoints.
    """
    if resume_from is None:
        if checkpoints is not None and checkpoints.settings.enabled:
            checkpoints.refuse_if_used()
        return TrainingState()
    info = read_checkpoint(resume_from)
    missing = [key for key in ("step", "consumed_samples", "total_valid_tokens", "loader", "rng") if key not in info]
    if missing:
        raise UserError(f"checkpoint {resume_from} is not of this trainer: training_info.json lacks {missing}")
    for key, kind in (("step", int), ("consumed_samples", int), ("loader", dict), ("rng", dict)):
        if not isinstance(info[key], kind) or isinstance(info[key], bool):
            raise UserError(
                f"checkpoint {resume_from} is damaged: {key} in training_info.json is {type(info[key]).__name__}; "
                f"wanted {kind.__name__}. Resume from another checkpoint"
            )
    loader.load_state_dict(info["loader"])
    policy.load_checkpoint(Path(resume_from) / POLICY)
    restore_rng_state(info["rng"], f"the random state in {resume_from}/training_info.json")
    log.info("resuming after step %d from %s", info["step"], resume_from)
    return TrainingState(info["step"], info["consumed_samples"], info["total_valid_tokens"])
