"""GRPO: advantages, loss, rollout correction, metrics and the trainer. Knows torch, and nothing of models or engines."""

from nemo_rl_dsv4.grpo.batch import Rollouts, build_train_data, count_valid
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import CheckpointSettings, GRPOSettings, LossSettings, read_section

__all__ = [
    "CheckpointSettings",
    "ClippedPGLoss",
    "GRPOSettings",
    "LossSettings",
    "Rollouts",
    "build_train_data",
    "count_valid",
    "read_section",
]
