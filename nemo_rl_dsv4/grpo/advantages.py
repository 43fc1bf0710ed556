"""Group-relative advantages: what each response earned beyond the other responses to its prompt.

Shapes: B responses (prompts x generations), S sequence length, G groups (distinct prompts).
"""

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation before the division, as NeMo-RL does."""
RELATIVE_RESOLUTION = 1e-6
"""A spread below this share of the group's largest reward is rounding of float32 rewards, not a difference."""


def prompt_groups(prompt_ids_BP: Tensor) -> Tensor:
    """Number rows by prompt: int64 [B], equal for equal rows.

    Args:
        prompt_ids_BP: token ids, right-padded to one length, integer [B, P].

    Rows with the same tokens share a group even when the prompt was drawn twice, as in NeMo-RL.
    """
    _, group_B = torch.unique(prompt_ids_BP, dim=0, return_inverse=True)
    return group_B


def group_baseline_and_std(rewards_B: Tensor, group_B: Tensor, *, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """Mean reward and standard deviation of each response's group, both float32 [B].

    Args:
        rewards_B: float [B].
        group_B: int64 [B], 0..G-1, from :func:`prompt_groups`.
        leave_one_out: True: over the other responses of the group (RLOO, arXiv 2402.14740); False: over all.

    The std is the unbiased one (n - 1 in the denominator). A group of one gets its own reward as baseline, so its
    advantage is 0. A std that needs two values and has fewer is 0, and so is one that float32 rewards cannot resolve
    (otherwise rounding noise divided by STD_EPSILON becomes an advantage).
    """
    rewards = rewards_B.to(torch.float64)
    ones = torch.ones_like(rewards)
    size = _group_sum(ones, group_B)
    mean = _group_sum(rewards, group_B) / size
    deviation = rewards - mean
    squares = _group_sum(deviation.square(), group_B)
    if leave_one_out:
        others = size - 1
        baseline = torch.where(others > 0, (mean * size - rewards) / others.clamp(min=1), rewards)
        # The others deviate from the group mean by -deviation in total, so their mean lies at -deviation / others.
        squares = squares - deviation.square() * size / others.clamp(min=1)
        counted = others
    else:
        baseline = torch.where(size > 1, mean, rewards)
        counted = size
    variance = torch.where(counted > 1, squares / (counted - 1).clamp(min=1), torch.zeros_like(squares))
    resolution = RELATIVE_RESOLUTION * _group_max(rewards.abs(), group_B)
    std = torch.where(variance > resolution.square(), variance.clamp(min=0).sqrt(), torch.zeros_like(variance))
    return baseline.to(torch.float32), std.to(torch.float32)


def group_relative_advantage(rewards_B: Tensor, baseline_B: Tensor, std_B: Tensor, *, normalize: bool) -> Tensor:
    """reward - baseline, divided by (std + 1e-6) where std > 0 if `normalize`: float32 [B] (GRPO, arXiv 2402.03300)."""
    advantage = rewards_B.to(torch.float32) - baseline_B
    if not normalize:
        return advantage
    return torch.where(std_B > 0, advantage / (std_B + STD_EPSILON), advantage)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp to [low, high]; None leaves that side open."""
    if low is None and high is None:
        return advantages
    return advantages.clamp(min=low, max=high)


def expand_to_tokens(advantage_B: Tensor, token_mask_BS: Tensor) -> Tensor:
    """The advantage of a response at every position of its row: float32 [B, S]; the loss masks what is not response."""
    return advantage_B.to(torch.float32).unsqueeze(-1).expand(token_mask_BS.shape).contiguous()


def _group_sum(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For every row, the sum of `values` over its group: [B]."""
    total_G = values_B.new_zeros(int(group_B.max()) + 1).index_add_(0, group_B, values_B)
    return total_G[group_B]


def _group_max(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For every row, the largest of the non-negative `values` in its group: [B]."""
    largest_G = values_B.new_zeros(int(group_B.max()) + 1).scatter_reduce_(0, group_B, values_B, "amax")
    return largest_G[group_B]
