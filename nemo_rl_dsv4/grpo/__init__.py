"""GRPO: advantages, loss, rollout correction, metrics, trainer. Knows torch, and nothing of models or engines.

Names are imported when they are first used: the settings alone do not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_dsv4.grpo.batch import Rollouts, build_train_data, count_valid
    from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
    from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
    from nemo_rl_dsv4.grpo.phases import Phases
    from nemo_rl_dsv4.grpo.settings import LossSettings, TrainerSettings
    from nemo_rl_dsv4.grpo.trainer import TrainingSummary, grpo_train

_HOMES = {
    "Rollouts": "batch",
    "build_train_data": "batch",
    "count_valid": "batch",
    "CheckpointStore": "checkpointing",
    "ClippedPGLoss": "loss",
    "Phases": "phases",
    "LossSettings": "settings",
    "TrainerSettings": "settings",
    "TrainingSummary": "trainer",
    "grpo_train": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "CheckpointStore",
    "ClippedPGLoss",
    "LossSettings",
    "Phases",
    "Rollouts",
    "TrainerSettings",
    "TrainingSummary",
    "build_train_data",
    "count_valid",
    "grpo_train",
]
