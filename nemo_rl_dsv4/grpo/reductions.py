"""Masked sums with a global normaliser.

Every mean of this package is a sum over the local rows divided by a count taken over the whole global batch. Summing
the results of all micro-batches and ranks then gives the single-batch value, whatever the split.

Shapes: B sequences, T predicted positions (sequence length - 1).
"""

import math

import torch
from torch import Tensor

Normaliser = Tensor | float | int


def combined_mask(token_mask_BT: Tensor, sample_mask_B: Tensor) -> Tensor:
    """Weight of each token, token_mask * sample_mask: float32 [B, T]."""
    return token_mask_BT.to(torch.float32) * sample_mask_B.to(torch.float32).unsqueeze(-1)


def fill_masked(values_BT: Tensor, mask_BT: Tensor, fill: float = 0.0) -> Tensor:
    """`values` with the positions of zero weight replaced, so that an inf or NaN in padding reaches no gradient."""
    return torch.where(mask_BT > 0, values_BT, torch.full_like(values_BT, fill))


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """sum(values * mask), a scalar in the dtype of `values`; whatever stands at zero weight is not read."""
    return (fill_masked(values_BT, mask_BT) * mask_BT.to(values_BT.dtype)).sum()


def divide_by_count(total: Tensor, count: Normaliser) -> Tensor:
    """total / count, and total (which is 0) when nothing was counted."""
    if not isinstance(count, Tensor):
        return total / max(float(count), 1.0)
    return total / count.to(total.device, total.dtype).clamp(min=1)


def token_mean(values_BT: Tensor, mask_BT: Tensor, global_valid_tokens: Normaliser) -> Tensor:
    """Local part of the mean over all response tokens of the global batch: a scalar.

    Args:
        values_BT: [B, T], floating.
        mask_BT: [B, T] weights, zero on prompt, padding and excluded samples.
        global_valid_tokens: sum of the mask over all micro-batches and data-parallel ranks.
    """
    return divide_by_count(masked_sum(values_BT, mask_BT), global_valid_tokens)


def mean_per_sequence(values_BT: Tensor, token_mask_BT: Tensor) -> Tensor:
    """Mean over the response tokens of each sequence: [B]; 0 where a sequence has none."""
    total_B = (fill_masked(values_BT, token_mask_BT) * token_mask_BT.to(values_BT.dtype)).sum(dim=-1)
    return total_B / token_mask_BT.to(values_BT.dtype).sum(dim=-1).clamp(min=1)


def sequence_mean(
    values_BT: Tensor, token_mask_BT: Tensor, sample_mask_B: Tensor, global_valid_seqs: Normaliser
) -> Tensor:
    """Local part of the mean over sequences of the per-sequence token means: a scalar.

    `global_valid_seqs` is the sum of sample_mask over all micro-batches and data-parallel ranks.
    """
    per_sequence_B = mean_per_sequence(values_BT, token_mask_BT)
    return divide_by_count(masked_sum(per_sequence_B, sample_mask_B), global_valid_seqs)


def standard_error(values_N: Tensor) -> float:
    """Standard error of the mean, std / sqrt(n) with the unbiased std; 0 for a single value."""
    if values_N.numel() < 2:
        return 0.0
    return values_N.std().item() / math.sqrt(values_N.numel())
