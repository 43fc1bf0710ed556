"""Importance correction for a rollout engine that computes other probabilities than the trainer.

r = rollout logprob, t = training logprob of the sampled token. The weight exp(t - r) of a token (or sequence) makes the
gradient that of the training policy; the variants differ in what they do where the two disagree too much.

Shapes: B sequences, T predicted positions. Weights are float32 and carry no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.reductions import fill_masked, mean_per_sequence

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-this before exp, so that no weight overflows."""


class Correction(NamedTuple):
    """Weights and what was out of bounds.

    weights: float32 [B, T] ([B, 1] for sequence-level weights).
    out_of_bounds: bool [B, T] for tokens, [B] for `seq-mask-tis`; None when nothing is truncated.
    """

    weights: Tensor
    out_of_bounds: Tensor | None


def importance_weights(train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor) -> Tensor:
    """exp(clamp(t - r, -20, 20)): [B, T], detached.

    NeMo-RL sets an overflowing weight to 0; clamped, it stays large and a truncation decides what becomes of it.
    """
    log_ratio = (train_logprobs_BT - rollout_logprobs_BT).detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_importance_weights(train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(sum over the response of t - r, clamped to +-20): [B, 1], detached."""
    log_ratio = fill_masked(train_logprobs_BT - rollout_logprobs_BT, mask_BT).detach()
    total_B1 = (log_ratio * mask_BT).sum(dim=-1, keepdim=True)
    return total_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate_token_weights(weights: Tensor, low: float, high: float) -> Correction:
    """TIS: weights clamped to [low, high] (truncated importance sampling)."""
    return Correction(weights.clamp(low, high), (weights < low) | (weights > high))


def icepop_weights(weights: Tensor, low: float, high: float) -> Correction:
    """IcePop: weights outside [low, high] become 0, the others stay as they are."""
    outside = (weights < low) | (weights > high)
    return Correction(torch.where(outside, torch.zeros_like(weights), weights), outside)


def geometric_mean_ratio(train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, token_mask_BT: Tensor) -> Tensor:
    """exp(mean over the response of t - r): [B], detached; 1 for a sequence without response tokens."""
    log_ratio = fill_masked(train_logprobs_BT - rollout_logprobs_BT, token_mask_BT).detach()
    return mean_per_sequence(log_ratio, token_mask_BT).exp()


def mask_sequences_by_geometric_mean(
    weights_BT: Tensor, geometric_mean_B: Tensor, low: float, high: float
) -> Correction:
    """seq-mask-tis: sequences whose geometric mean ratio is outside [low, high] get weight 0 on every token."""
    outside_B = (geometric_mean_B < low) | (geometric_mean_B > high)
    return Correction(weights_BT * (~outside_B).to(weights_BT.dtype).unsqueeze(-1), outside_B)


def sequence_mult_prob_error(train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of exp|r - t| over the response tokens of each sequence: float32 [B]; 0 where there are none."""
    error = fill_masked((rollout_logprobs_BT - train_logprobs_BT).abs(), mask_BT).exp()
    return mean_per_sequence(error, (mask_BT > 0).to(error.dtype))


def mask_high_error_sequences(sample_mask_B: Tensor, seq_error_B: Tensor, threshold: float | None) -> Tensor:
    """sample_mask with the sequences above `threshold` set to 0 (None masks nothing): [B]."""
    if threshold is None:
        return sample_mask_B
    return torch.where(seq_error_B <= threshold, sample_mask_B, torch.zeros_like(sample_mask_B))
