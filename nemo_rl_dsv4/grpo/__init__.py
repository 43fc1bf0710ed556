"""GRPO: advantages, loss, rollout correction, metrics, trainer. Knows torch, and nothing of models or engines."""

from nemo_rl_dsv4.grpo.batch import Rollouts, build_train_data, count_valid
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.settings import LossSettings, TrainerSettings
from nemo_rl_dsv4.grpo.trainer import TrainingSummary, grpo_train

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
