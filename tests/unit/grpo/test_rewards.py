import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.rewards import (
    count_outside_source,
    groups_with_spread,
    overlong_penalty,
    scale_rewards,
    shape_rewards,
)
from nemo_rl_dsv4.grpo.settings import RewardScalingSettings, RewardShapingSettings


def test_scaling_maps_and_clamps():
    settings = RewardScalingSettings(enabled=True, target_min=-1.0, target_max=1.0)
    rewards = torch.tensor([0.0, 0.25, 1.0, 7.0, -2.0])
    assert scale_rewards(rewards, settings).tolist() == [-1.0, -0.5, 1.0, 1.0, -1.0]
    assert count_outside_source(rewards, settings) == 2
    assert scale_rewards(rewards, RewardScalingSettings()) is rewards


def test_overlong_penalty_by_hand():
    """Limit 100, buffer 20: nothing up to 80, half at 90, all at 100."""
    found = overlong_penalty(torch.tensor([10, 80, 90, 100]), max_length=100, buffer=20, penalty=2.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, -1.0, -2.0])


def test_shaping_adds_the_penalty_or_scales_truncated():
    rewards, lengths = torch.tensor([1.0, 1.0]), torch.tensor([10, 100])
    truncated = torch.tensor([False, True])
    dapo = RewardShapingSettings(
        enabled=True, overlong_buffer_length=20, overlong_buffer_penalty=1.0, max_response_length=100
    )
    assert shape_rewards(rewards, lengths, truncated, dapo).tolist() == [1.0, 0.0]
    stop = RewardShapingSettings(enabled=True, stop_properly_penalty_coef=0.25)
    assert shape_rewards(rewards, lengths, truncated, stop).tolist() == [1.0, 0.25]
    assert shape_rewards(rewards, lengths, truncated, RewardShapingSettings()) is rewards


def test_dynamic_sampling_keeps_whole_groups():
    """The only success of a group stays: a per-response leave-one-out std of 0 must not drop it."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    assert groups_with_spread(rewards, group).tolist() == [True] * 3 + [False] * 4


def test_bad_settings_are_named():
    with pytest.raises(UserError, match="source_max"):
        RewardScalingSettings(source_min=1.0, source_max=1.0)
    with pytest.raises(UserError, match="max_response_length"):
        RewardShapingSettings(enabled=True, overlong_buffer_length=1, overlong_buffer_penalty=1.0)
