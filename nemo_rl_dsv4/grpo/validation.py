"""Accuracy on held-out problems, sampled as the recipe asks, with its standard error."""

from collections.abc import Sequence

import torch

from nemo_rl_dsv4.grpo.batch import repeat_each
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.protocols import Environment, Generation, Prompt, Tokenizer
from nemo_rl_dsv4.grpo.reductions import standard_error
from nemo_rl_dsv4.grpo.rollout import generate_rows, sampling_seed, score_rollouts
from nemo_rl_dsv4.grpo.settings import GRPOSettings, ValidationSampling


def validation_due(step: int, *, is_last: bool, settings: GRPOSettings) -> bool:
    """Whether to validate after `step`: every val_period steps from val_start_at on; with val_at_end after the last."""
    periodic = settings.val_period > 0 and step >= settings.val_start_at and step % settings.val_period == 0
    return periodic or (settings.val_at_end and is_last)


def validate(
    prompts: Sequence[Prompt],
    generation: Generation,
    environment: Environment,
    tokenizer: Tokenizer,
    settings: GRPOSettings,
    sampling: ValidationSampling,
    phases: Phases,
) -> dict[str, float]:
    """Sample and score the first `max_val_samples` prompts.

    The seed of a batch does not depend on the step: two validations draw the same random numbers, so their difference
    is that of the weights.

    Returns:
        `accuracy` (mean reward, as in NeMo-RL), `accuracy_stderr`, `num_samples` (problems), `avg_length` (response
        tokens), `truncation_rate`, and `pass_k` with several responses a problem.
    """
    chosen = prompts[: settings.max_val_samples]
    repeats = settings.val_num_generations_per_prompt
    batch_size = settings.val_batch_size or len(chosen)
    rewards, lengths, truncated = [], [], []
    with phases.phase("total_validation_time", total=len(chosen) * repeats):
        generation.prepare_for_generation()
        for number, start in enumerate(range(0, len(chosen), batch_size)):
            rows = repeat_each(chosen[start : start + batch_size], repeats)
            seed = sampling_seed(settings.seed, "validation", 0, number)
            rollouts = generate_rows(
                rows,
                generation,
                tokenizer.pad_id,
                seed=seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
            rollouts = score_rollouts(rollouts, environment, tokenizer)
            rewards.append(rollouts.raw_rewards)
            lengths.append(rollouts.response_lengths)
            truncated.append(rollouts.truncated)
            phases.reach(sum(len(part) for part in rewards))
        generation.finish_generation()
    reward_NK = torch.cat(rewards).reshape(-1, repeats).to(torch.float64)
    metrics = {
        "accuracy": reward_NK.mean().item(),
        "accuracy_stderr": standard_error(reward_NK.mean(dim=1)),
        "num_samples": float(reward_NK.shape[0]),
        "avg_length": torch.cat(lengths).to(torch.float64).mean().item(),
        "truncation_rate": torch.cat(truncated).to(torch.float64).mean().item(),
    }
    if repeats > 1:
        metrics["pass_k"] = (reward_NK > 0).any(dim=1).to(torch.float64).mean().item()
    return metrics
