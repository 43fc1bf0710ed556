"""Per-token estimators of a KL divergence from samples (Schulman, "Approximating KL Divergence", 2020).

With x drawn from `sampled` p and log ratio d = log q(x) - log p(x), estimators of KL(p || q):
k1 = -d (unbiased, can be negative), k2 = d^2 / 2, k3 = exp(d) - 1 - d (unbiased, never negative).
"""

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError


def k1(log_ratio: Tensor) -> Tensor:
    """-d."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, with expm1 so that small ratios do not cancel."""
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    curr_logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kl_type: str,
    sampling_weight: Tensor,
    input_clamp: float | None,
    output_clamp: float | None,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) with the gradient of its sampling distribution: [B, T].

    Args:
        curr_logprobs: log-probabilities of the policy being trained, float32 [B, T], with gradient.
        reference_logprobs: those of the frozen reference policy, float32 [B, T].
        kl_type: k1, k2 or k3.
        sampling_weight: p_policy / p_sampling, [B, T], with gradient. On policy its value is 1 and its gradient is the
            score function, without which the gradient of the estimate is not that of the KL (arXiv 2506.09477).
        input_clamp: the log ratio is clamped to +-this first, and a clamped token passes no gradient at all.
        output_clamp: the weighted estimate is clamped to +-this.

    Follows NeMo-RL main; revisions before mid-2026 had no sampling weight unless the on-policy approximation was on.
    """
    if kl_type not in ESTIMATORS:
        raise UserError(f"loss_fn.reference_policy_kl_type is {kl_type!r}; it must be k1, k2 or k3")
    log_ratio = reference_logprobs - curr_logprobs
    if input_clamp is not None:
        inside = log_ratio.abs() <= input_clamp
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
        sampling_weight = torch.where(inside, sampling_weight, sampling_weight.detach())
    estimate = sampling_weight * ESTIMATORS[kl_type](log_ratio)
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)
