"""The metrics of one step under NeMo-RL's names.

Shapes: B sequences, S tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.batch import Batch, Rollouts, count_valid
from nemo_rl_dsv4.grpo.metrics import VERL_METRICS, combine_micro_batches


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Lengths, how responses ended, and the environment's own reward, over the rows that are trained on."""
    response = rollouts.response_lengths.to(torch.float64)
    prompt = rollouts.prompt_lengths.to(torch.float64)
    truncated = rollouts.truncated.to(torch.float64).mean().item()
    return {
        "raw_reward": rollouts.raw_rewards.mean().item(),
        "mean_prompt_length": prompt.mean().item(),
        "mean_gen_tokens_per_sample": response.mean().item(),
        "max_gen_tokens_per_sample": response.max().item(),
        "mean_total_tokens_per_sample": (prompt + response).mean().item(),
        "total_num_tokens": (prompt + response).sum().item(),
        "truncation_rate": truncated,
        "natural_termination_rate": 1.0 - truncated,
    }


def advantage_metrics(data: Batch) -> dict[str, float]:
    """Mean, largest and smallest advantage over the response tokens; 0 when there are none."""
    values = data["advantages"][data["token_mask"] > 0]
    if values.numel() == 0:
        values = values.new_zeros(1)
    return {
        "advantages/mean": values.mean().item(),
        "advantages/max": values.max().item(),
        "advantages/min": values.min().item(),
    }


def sequence_error_metrics(seq_error_B: Tensor, before_B: Tensor, after_B: Tensor) -> dict[str, float]:
    """Spread of the per-sequence error exp|r - t|, before and after masking sequences above the threshold.

    Args:
        seq_error_B: from :func:`nemo_rl_dsv4.grpo.rollout_correction.sequence_mult_prob_error`; 0 = no valid token.
        before_B: sample_mask before masking.
        after_B: sample_mask after masking.
    """
    metrics: dict[str, float] = {}
    for suffix, mask_B in (("", before_B), ("_after_mask", after_B)):
        values = seq_error_B[(mask_B > 0) & (seq_error_B > 0)]
        if values.numel() == 0:
            values = values.new_zeros(1)
        metrics[f"max_seq_mult_prob_error{suffix}"] = values.max().item()
        metrics[f"mean_seq_mult_prob_error{suffix}"] = values.mean().item()
        metrics[f"min_seq_mult_prob_error{suffix}"] = values.min().item()
    metrics["num_masked_seqs_by_logprob_error"] = (before_B > 0).sum().item() - (after_B > 0).sum().item()
    return metrics


def training_metrics(result: Mapping[str, Any], data: Batch) -> dict[str, float]:
    """What the policy reported about the update, one number a name.

    Raises:
        FloatingPointError: loss or gradient norm is not finite.
    """
    metrics = combine_micro_batches(result["all_mb_metrics"])
    metrics.setdefault("loss", as_float(result["loss"]))
    metrics["grad_norm"] = as_float(result["grad_norm"])
    if "lr" in result:
        metrics["lr"] = as_float(result["lr"])
    if "router" in result:
        metrics |= result["router"].metrics()
    seqs, tokens = count_valid(data)
    metrics["global_valid_seqs"], metrics["global_valid_toks"] = seqs.item(), tokens.item()
    broken = {name: metrics[name] for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])}
    if broken:
        raise FloatingPointError(f"training diverged: {broken}; the last checkpoint is the one to continue from")
    return metrics


def throughput(seconds: Mapping[str, float], total_tokens: float, samples: int, processes: int) -> dict[str, float]:
    """Tokens (prompt + response) and samples a second, whole step and by phase, under NeMo-RL's `performance/` names.

    Args:
        seconds: by phase, with `total_step_time`.
        total_tokens: tokens of the rows that were trained on.
        samples: number of those rows.
        processes: training processes (GPUs, or CPU processes).
    """

    def per_second(amount: float, *phases: str) -> float:
        spent = sum(seconds.get(name, 0.0) for name in phases)
        return amount / spent if spent > 0 else 0.0

    logprobs, training = "policy_and_reference_logprobs", "policy_training"
    rates = {
        "samples_per_sec": per_second(samples, "total_step_time"),
        "tokens_per_sec": per_second(total_tokens, "total_step_time"),
        "generation_tokens_per_sec": per_second(total_tokens, "generation"),
        "training_worker_group_tokens_per_sec": per_second(total_tokens, logprobs, training),
    }
    each = {f"{name}_per_gpu": value / processes for name, value in rates.items()}
    each["policy_training_tokens_per_sec_per_gpu"] = per_second(total_tokens, training) / processes
    each["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] = per_second(total_tokens, logprobs) / processes
    return {**rates, **each}


def named_for_log(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """`prefix/name` for every metric, except verl's, which are logged as they stand."""
    return {name if name in VERL_METRICS else f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def as_float(value: Any) -> float:
    """A float from a number or a tensor; the mean of several (one per update)."""
    if isinstance(value, Tensor):
        return value.to(torch.float64).mean().item()
    return float(value)
