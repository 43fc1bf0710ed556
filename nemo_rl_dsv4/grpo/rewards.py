"""Rewards on their way from the environment to the advantages: scaling, length shaping, dynamic sampling.

Shapes: B responses. Rewards are float32.
"""

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.settings import RewardScalingSettings, RewardShapingSettings


def scale_rewards(rewards_B: Tensor, settings: RewardScalingSettings) -> Tensor:
    """Clamp to [source_min, source_max] and map that interval linearly onto [target_min, target_max]: [B]."""
    if not settings.enabled:
        return rewards_B
    share = (rewards_B.clamp(settings.source_min, settings.source_max) - settings.source_min) / (
        settings.source_max - settings.source_min
    )
    return settings.target_min + share * (settings.target_max - settings.target_min)


def count_outside_source(rewards_B: Tensor, settings: RewardScalingSettings) -> int:
    """Number of rewards that :func:`scale_rewards` clamps."""
    if not settings.enabled:
        return 0
    return int(((rewards_B < settings.source_min) | (rewards_B > settings.source_max)).sum())


def overlong_penalty(response_lengths_B: Tensor, *, max_length: int, buffer: int, penalty: float) -> Tensor:
    """min(0, -(length - (max_length - buffer)) / buffer * penalty): float32 [B] (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to -penalty at `max_length` (and beyond it further, as
    NeMo-RL does; the paper stops at -penalty).
    """
    exceeding = response_lengths_B.to(torch.float32) - (max_length - buffer)
    return (-exceeding / buffer * penalty).clamp(max=0.0)


def shape_rewards(
    rewards_B: Tensor, response_lengths_B: Tensor, truncated_B: Tensor, settings: RewardShapingSettings
) -> Tensor:
    """Add the overlong penalty, or multiply truncated responses by stop_properly_penalty_coef if that is set: [B].

    Args:
        rewards_B: scaled rewards, float32.
        response_lengths_B: response tokens, integer.
        truncated_B: True where generation ended at the length limit, bool.
    """
    if not settings.enabled:
        return rewards_B
    if settings.stop_properly_penalty_coef is not None:
        return torch.where(truncated_B, rewards_B * settings.stop_properly_penalty_coef, rewards_B)
    length, buffer, penalty = (
        settings.max_response_length,
        settings.overlong_buffer_length,
        settings.overlong_buffer_penalty,
    )
    assert length is not None and buffer is not None and penalty is not None  # RewardShapingSettings refuses None
    return rewards_B + overlong_penalty(response_lengths_B, max_length=length, buffer=buffer, penalty=penalty)


def groups_with_spread(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """True for the responses of groups whose rewards are not all equal: bool [B] (DAPO's dynamic sampling).

    Judged on the rewards before length shaping. NeMo-RL drops single responses whose leave-one-out std is 0, which with
    one success in a group drops exactly that success; here a group stays or goes as a whole.
    """
    groups = int(group_B.max()) + 1
    largest = torch.full((groups,), -torch.inf, dtype=rewards_B.dtype).scatter_reduce_(0, group_B, rewards_B, "amax")
    smallest = torch.full((groups,), torch.inf, dtype=rewards_B.dtype).scatter_reduce_(0, group_B, rewards_B, "amin")
    return (largest > smallest)[group_B]
