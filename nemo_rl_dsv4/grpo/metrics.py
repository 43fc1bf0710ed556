"""How far rollout and training probabilities lie apart, and how metrics of micro-batches become one number a step.

r = rollout logprob, t = training logprob of each sampled token. A comparison holds for: response tokens only (prompt
and padding are masked), the same weights on both sides (t is `prev_logprobs`, taken before the update of the step), and
the same temperature on both sides (logprobs of the raw logits).
Per-token formulas return [B, T] in the dtype given; :func:`mismatch_metrics` evaluates them in float64, because k3 of
probabilities that nearly agree is far below float32's resolution of exp(d).
Names are NeMo-RL's, and verl's for `rollout_corr/kl` (k1) and `training/rollout_probs_diff_*`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.kl import k1, k3
from nemo_rl_dsv4.grpo.reductions import Normaliser, fill_masked, token_mean

VERL_METRICS = frozenset({"rollout_corr/kl", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"})
"""Logged under these names as they stand; NeMo-RL's names get the prefix `train/`."""
AVERAGED_METRICS = frozenset({"lr", "wd", "global_valid_seqs", "global_valid_toks"})
"""The same on every micro-batch, so averaged where the others are summed."""


def rollout_train_k1(t: Tensor, r: Tensor) -> Tensor:
    """r - t: k1 estimate of KL(rollout || training), can be negative. Mean is verl's `rollout_corr/kl`."""
    return k1(t - r)


def rollout_train_k3(t: Tensor, r: Tensor) -> Tensor:
    """exp(t - r) - 1 - (t - r): k3 estimate of KL(rollout || training). Mean is NeMo-RL's `gen_kl_error`.

    NeMo-RL main evaluates it with `reference_policy_kl_type`; here it is always k3, which is that key's default.
    """
    return k3(t - r)


def train_rollout_k3(t: Tensor, r: Tensor) -> Tensor:
    """exp(r - t) - 1 - (r - t). Mean is NeMo-RL's `policy_kl_error`."""
    return k3(r - t)


def js_divergence(t: Tensor, r: Tensor) -> Tensor:
    """Jensen-Shannon estimate with the mixture m = log(0.5 e^t + 0.5 e^r): half k3(t - m) plus half k3(r - m).

    Mean is NeMo-RL's `js_divergence_error`.
    """
    mixture = torch.logaddexp(t, r) - math.log(2.0)
    return 0.5 * k3(t - mixture) + 0.5 * k3(r - mixture)


def mult_prob_error(t: Tensor, r: Tensor) -> Tensor:
    """exp|r - t|: the factor by which the two probabilities differ, at least 1. Mean is `token_mult_prob_error`."""
    return (r - t).abs().exp()


def prob_difference(t: Tensor, r: Tensor) -> Tensor:
    """|e^t - e^r|. Mean and maximum are verl's `training/rollout_probs_diff_mean` and `_max`."""
    return (t.exp() - r.exp()).abs()


def entropy_estimate(curr: Tensor, r: Tensor) -> Tensor:
    """-exp(curr - r) curr: entropy of the current policy from rollout samples. Mean is `approx_entropy`."""
    return -(curr - r).exp() * curr


def mismatch_metrics(
    train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, global_valid_tokens: Normaliser
) -> dict[str, Tensor]:
    """Local parts of all mismatch metrics: name -> float64 scalar; sum them over micro-batches and ranks.

    Args:
        train_logprobs_BT: t, [B, T].
        rollout_logprobs_BT: r, [B, T].
        mask_BT: token_mask * sample_mask, [B, T].
        global_valid_tokens: sum of the mask over the global batch.

    Names ending in `_max` are maxima, to be combined with max (-inf when no token is valid).
    """
    t = fill_masked(train_logprobs_BT.detach().to(torch.float64), mask_BT)
    r = fill_masked(rollout_logprobs_BT.detach().to(torch.float64), mask_BT)

    def mean(values: Tensor) -> Tensor:
        return token_mean(values, mask_BT, global_valid_tokens)

    difference = prob_difference(t, r)
    return {
        "gen_kl_error": mean(rollout_train_k3(t, r)),
        "policy_kl_error": mean(train_rollout_k3(t, r)),
        "js_divergence_error": mean(js_divergence(t, r)),
        "token_mult_prob_error": mean(mult_prob_error(t, r)),
        "rollout_corr/kl": mean(rollout_train_k1(t, r)),
        "training/rollout_probs_diff_mean": mean(difference),
        "training/rollout_probs_diff_max": masked_extreme(difference, mask_BT, largest=True),
    }


def masked_extreme(values_BT: Tensor, mask_BT: Tensor, *, largest: bool) -> Tensor:
    """Largest (or smallest) value where the mask is not zero: a scalar, -inf (or inf) when nothing is valid."""
    nothing = -math.inf if largest else math.inf
    filled = fill_masked(values_BT, mask_BT, nothing)
    return filled.amax() if largest else filled.amin()


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars to Python floats with a single device-to-host copy."""
    stacked = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()])
    return dict(zip(metrics, stacked.tolist(), strict=True))


def scale_for_updates(metrics: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Divide by the number of optimizer updates a step makes, except extremes.

    A step of several global batches sums over all their micro-batches; divided first, the sum is the mean over updates.
    """
    return {name: value if _is_extreme(name) else value / num_updates for name, value in metrics.items()}


def collect_micro_batches(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """[{name: value}, ...] of micro-batches to {name: [value, ...]}, the form of the policy's `all_mb_metrics`."""
    collected: dict[str, list[float]] = {}
    for part in metrics:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    return collected


def combine_micro_batches(all_mb_metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """One number a metric from the values of every micro-batch and rank (the policy's `all_mb_metrics`).

    `*_min` and `*_max` are combined with min and max, AVERAGED_METRICS with the mean, everything else by summation.
    A metric whose every value is infinite (no valid token anywhere) is left out.
    """
    combined: dict[str, float] = {}
    for name, values in all_mb_metrics.items():
        if _is_extreme(name):
            finite = [value for value in values if not math.isinf(value)]
            if finite:
                combined[name] = min(finite) if name.endswith("_min") else max(finite)
        elif name in AVERAGED_METRICS:
            combined[name] = math.fsum(values) / len(values)
        else:
            combined[name] = math.fsum(values)
    return combined


def _is_extreme(name: str) -> bool:
    return name.endswith(("_min", "_max"))
