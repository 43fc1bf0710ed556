import math

import pytest
import torch

from nemo_rl_dsv4.grpo.advantages import (
    clip_advantages,
    expand_to_tokens,
    group_baseline_and_std,
    group_relative_advantage,
    prompt_groups,
)


def test_equal_prompts_share_a_group_wherever_they_stand():
    """Rows with the same tokens get the same number, others another."""
    groups = prompt_groups(torch.tensor([[5, 6, 0], [5, 7, 0], [5, 6, 0], [5, 6, 1]]))
    assert groups[0] == groups[2]
    assert len({groups[0].item(), groups[1].item(), groups[3].item()}) == 3


def test_leave_one_out_by_hand():
    """Rewards 1, 0, 0, 1: the others of a 1 average 1/3, of a 0 average 2/3; std over three values."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    baseline, std = group_baseline_and_std(rewards, torch.zeros(4, dtype=torch.int64), leave_one_out=True)
    assert baseline.tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert std.tolist() == pytest.approx([math.sqrt(1 / 3)] * 4)
    advantage = group_relative_advantage(rewards, baseline, std, normalize=True)
    assert advantage[0].item() == pytest.approx((2 / 3) / (math.sqrt(1 / 3) + 1e-6), rel=1e-6)


def test_leave_one_out_equals_the_definition_on_random_groups():
    """Against mean and std of the literally removed list, on groups of different sizes interleaved in the batch."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(23, generator=generator)
    group = torch.arange(23) % 3
    baseline, std = group_baseline_and_std(rewards, group, leave_one_out=True)
    for row in range(23):
        others = rewards[(group == group[row]) & (torch.arange(23) != row)].double()
        assert baseline[row].item() == pytest.approx(others.mean().item(), abs=1e-6)
        assert std[row].item() == pytest.approx(others.std().item(), rel=1e-5)


def test_full_group_baseline_and_std():
    """Without leave-one-out: plain mean and unbiased std."""
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0])
    group = torch.tensor([0, 0, 0, 1, 1])
    baseline, std = group_baseline_and_std(rewards, group, leave_one_out=False)
    assert baseline.tolist() == pytest.approx([3.0, 3.0, 3.0, 4.0, 4.0])
    assert std.tolist() == pytest.approx([math.sqrt(7)] * 3 + [0.0, 0.0])


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_no_advantage(leave_one_out):
    """0.1 is not exact in binary: rounding of its mean must not become an advantage by division with 1e-6."""
    rewards = torch.full((7,), 0.1)
    baseline, std = group_baseline_and_std(rewards, torch.zeros(7, dtype=torch.int64), leave_one_out=leave_one_out)
    assert std.tolist() == [0.0] * 7
    assert group_relative_advantage(rewards, baseline, std, normalize=True).tolist() == [0.0] * 7


def test_one_success_among_equal_failures_is_not_blown_up():
    """The others of the only success are all equal: its std is 0, so its advantage is the plain difference."""
    rewards = torch.tensor([1.1] + [0.1] * 6)
    baseline, std = group_baseline_and_std(rewards, torch.zeros(7, dtype=torch.int64), leave_one_out=True)
    advantage = group_relative_advantage(rewards, baseline, std, normalize=True)
    assert std[0].item() == 0.0
    assert advantage[0].item() == pytest.approx(1.0, abs=1e-6)


def test_small_groups():
    """A single response has advantage 0; of two, leave-one-out gives the difference and no std."""
    rewards = torch.tensor([5.0, 1.0, 0.0])
    baseline, std = group_baseline_and_std(rewards, torch.tensor([0, 1, 1]), leave_one_out=True)
    assert group_relative_advantage(rewards, baseline, std, normalize=True).tolist() == [0.0, 1.0, -1.0]
    assert std.tolist() == [0.0, 0.0, 0.0]


def test_normalize_off_leaves_the_difference():
    advantage = group_relative_advantage(
        torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25]), torch.tensor([0.5, 0.5]), normalize=False
    )
    assert advantage.tolist() == [0.75, -0.25]


def test_clip_and_expand():
    advantage = clip_advantages(torch.tensor([-9.0, 0.5, 9.0]), -5.0, None)
    assert advantage.tolist() == [-5.0, 0.5, 9.0]
    assert clip_advantages(advantage, None, 2.0).tolist() == [-5.0, 0.5, 2.0]
    expanded = expand_to_tokens(advantage, torch.zeros(3, 4, dtype=torch.int64))
    assert expanded.shape == (3, 4) and expanded.dtype == torch.float32
    assert expanded[2].tolist() == [9.0] * 4
