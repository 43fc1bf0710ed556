"""The GRPO loop, in NeMo-RL's step order."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.advantages import (
    clip_advantages,
    expand_to_tokens,
    group_baseline_and_std,
    group_relative_advantage,
    prompt_groups,
)
from nemo_rl_dsv4.grpo.batch import Batch, Rollouts, build_train_data
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.protocols import Environment, Generation, Loader, MetricsLogger, Policy, Prompt, Tokenizer
from nemo_rl_dsv4.grpo.reductions import combined_mask
from nemo_rl_dsv4.grpo.resume import TrainingState, restore, training_info
from nemo_rl_dsv4.grpo.rollout import StepRollouts, gather_rollouts
from nemo_rl_dsv4.grpo.rollout_correction import mask_high_error_sequences, sequence_mult_prob_error
from nemo_rl_dsv4.grpo.rollout_source import Ahead, Alternating, Position, RolloutSource
from nemo_rl_dsv4.grpo.settings import TrainerSettings
from nemo_rl_dsv4.grpo.step_metrics import (
    advantage_metrics,
    named_for_log,
    rollout_metrics,
    sequence_error_metrics,
    throughput,
    training_metrics,
)
from nemo_rl_dsv4.grpo.validation import validate, validation_due


@dataclass
class TrainingSummary:
    """What a finished run can say about itself."""

    state: TrainingState
    stop_reason: str
    first_validation: dict[str, float] | None = None
    last_validation: dict[str, float] | None = None
    checkpoints: list[Path] = field(default_factory=list)
    """Checkpoints this call wrote, oldest first; some may have been removed by keep_top_k."""
    seconds: float = 0.0


def grpo_train(
    policy: Policy,
    generation: Generation,
    loader: Loader,
    val_prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    environment: Environment,
    logger: MetricsLogger,
    settings: TrainerSettings,
    *,
    checkpoints: CheckpointStore | None = None,
    resume_from: Path | None = None,
    phases: Phases | None = None,
) -> TrainingSummary:
    """Train until max_num_steps, max_num_epochs, the validation target or the time limit is reached.

    Args:
        policy: what is trained.
        generation: what rolls out; gets the policy's weights before every use that needs them.
        loader: training prompts, `num_prompts_per_step` (x `batch_multiplier` with dynamic sampling) a batch.
        val_prompts: held-out prompts.
        tokenizer: turns responses into text; gives the padding id.
        environment: scores responses.
        logger: receives one set of metrics a step; validation results are in the set of their step (0 = before
            training).
        settings: see :class:`nemo_rl_dsv4.grpo.settings.TrainerSettings`.
        checkpoints: where checkpoints go; None writes none. A new run needs a folder without checkpoints.
        resume_from: a `step_N` folder; the run goes on with step N + 1 exactly as it would have (with
            `grpo.async_grpo` from rollouts of newer weights).
        phases: time and progress; may be shared with an engine that reports its own progress.

    Raises:
        UserError: settings contradict the inputs, or a checkpoint is damaged or cannot be written.
        FloatingPointError: loss or gradient norm is not finite.
    """
    phases = phases or Phases()
    started = time.monotonic()
    loss_fn = ClippedPGLoss(settings.loss)
    check_validation_prompts(val_prompts, settings)
    rollout = FreshRollout(policy, generation, phases)
    state = restore(policy, loader, checkpoints, resume_from)
    summary = TrainingSummary(state, stop_reason=finished(state, loader, settings, started) or "")
    if summary.stop_reason:
        raise UserError(f"nothing to train: {summary.stop_reason} already; raise grpo.max_num_steps or max_num_epochs")

    def gather(step: int, phases: Phases) -> StepRollouts:
        return gather_rollouts(loader, generation, environment, tokenizer, settings.grpo, phases, step=step)

    with closing(rollout_source(gather, rollout.refit, loader, phases, settings)) as source:

        def run_validation() -> dict[str, float]:
            source.settle()
            rollout.refit()
            result = validate(
                val_prompts, generation, environment, tokenizer, settings.grpo, settings.validation_sampling, phases
            )
            summary.first_validation = summary.first_validation or result
            summary.last_validation = result
            return result

        if settings.grpo.val_at_start and state.step == 0:
            phases.start_step()
            metrics = named_for_log("validation", run_validation()) | timing_metrics(phases.seconds())
            metrics |= named_for_log("refit", rollout.take_metrics())
            logger.log_step(0, metrics)
            phases.finish_step(0, metrics)
            summary.stop_reason = target_reached(summary.last_validation, settings)

        while not summary.stop_reason:
            if checkpoints is not None:
                checkpoints.raise_failure()
            phases.start_step()
            step = state.step + 1
            rollouts, metrics = source.batch(step)
            with phases.phase("data_processing"):
                data = build_train_data(
                    rollouts,
                    pad_id=tokenizer.pad_id,
                    divisible_by=settings.sequence_multiple,
                    overlong_filtering=settings.grpo.overlong_filtering,
                )
            with phases.phase("policy_and_reference_logprobs", total=len(rollouts)):
                add_logprobs(data, policy, settings)
            with phases.phase("advantage_calculation"):
                metrics |= mask_sequences(data, settings)
                add_advantages(data, rollouts, settings)
            with phases.phase("training_prep"):
                policy.prepare_for_training()
            with phases.phase("policy_training", total=len(rollouts)):
                rollout.stale = True
                result = policy.train(data, loss_fn)
                policy.finish_training()
            metrics |= rollout_metrics(rollouts) | advantage_metrics(data) | training_metrics(result, data)

            state.step = step
            state.consumed_samples += settings.grpo.num_prompts_per_step
            state.total_valid_tokens += metrics["global_valid_toks"]
            summary.stop_reason = finished(state, source.position(), settings, started) or ""

            logged = named_for_log("train", metrics)
            if validation_due(step, is_last=bool(summary.stop_reason), settings=settings.grpo):
                validation = run_validation()
                logged |= named_for_log("validation", validation)
                summary.stop_reason = summary.stop_reason or target_reached(validation, settings)
            logged |= named_for_log("refit", rollout.take_metrics())

            due = step % settings.checkpointing.save_period == 0 or bool(summary.stop_reason)
            if checkpoints is not None and settings.checkpointing.enabled and due:
                with phases.phase("checkpointing"):
                    policy.prepare_for_training()
                    info = training_info(state, source.position(), logged, settings)
                    summary.checkpoints.append(
                        checkpoints.write(step, info, policy.save_checkpoint, settings.config_yaml)
                    )
                    policy.finish_training()

            seconds = phases.seconds()
            hidden = source.background_seconds()
            speed = throughput(hidden | seconds, metrics["total_num_tokens"], len(rollouts), settings.processes)
            logged |= named_for_log("performance", speed) | timing_metrics(seconds)
            logged |= {f"timing/train/background/{name}": value for name, value in hidden.items()}
            logger.log_step(step, logged)
            phases.finish_step(step, logged)

    if checkpoints is not None:
        checkpoints.wait()
    summary.seconds = time.monotonic() - started
    return summary


def rollout_source(
    gather: Callable[[int, Phases], StepRollouts],
    refit: Callable[[], None],
    loader: Loader,
    phases: Phases,
    settings: TrainerSettings,
) -> RolloutSource:
    """Rollout and training in turns, or with `grpo.async_grpo` at the same time."""
    ahead = settings.grpo.async_grpo
    if not ahead.enabled:
        return Alternating(gather, refit, loader, phases)
    age, last = ahead.max_trajectory_age_steps, settings.grpo.max_num_steps
    return Ahead(gather, refit, loader, phases, max_age=age, last_step=last)


class FreshRollout:
    """Gives the rollout engine the policy's weights when, and only when, they changed."""

    def __init__(self, policy: Policy, generation: Generation, phases: Phases) -> None:
        self._policy, self._generation, self._phases = policy, generation, phases
        self._metrics: dict[str, float] = {}
        self.stale = True

    def refit(self) -> None:
        """Export the weights if they are newer than the engine's."""
        if not self.stale:
            return
        with self._phases.phase("prepare_for_generation/total"):
            self._metrics = dict(self._policy.export_to(self._generation))
        self.stale = False

    def take_metrics(self) -> dict[str, float]:
        """What the last export reported, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def add_logprobs(data: Batch, policy: Policy, settings: TrainerSettings) -> None:
    """Put `prev_logprobs` and `reference_policy_logprobs` into `data` where the loss reads them."""
    if settings.needs_reference_logprobs:
        data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    if settings.needs_prev_logprobs:
        data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]


def mask_sequences(data: Batch, settings: TrainerSettings) -> dict[str, float]:
    """Take sequences whose rollout disagrees too much out of `sample_mask`; returns the spread of the disagreement."""
    if not settings.needs_prev_logprobs:
        return {}
    before = data["sample_mask"]
    mask = combined_mask(data["token_mask"], before)[:, 1:]
    error = sequence_mult_prob_error(data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:], mask)
    data["sample_mask"] = mask_high_error_sequences(before, error, settings.grpo.seq_logprob_error_threshold)
    return sequence_error_metrics(error, before, data["sample_mask"])


def add_advantages(data: Batch, rollouts: Rollouts, settings: TrainerSettings) -> None:
    """Put `advantages` [B, S] into `data`."""
    estimator = settings.grpo.adv_estimator
    baseline, std = group_baseline_and_std(
        rollouts.rewards, prompt_groups(rollouts.prompt_ids), leave_one_out=estimator.use_leave_one_out_baseline
    )
    advantage = group_relative_advantage(rollouts.rewards, baseline, std, normalize=estimator.normalize_rewards)
    advantage = clip_advantages(advantage, settings.grpo.advantage_clip_low, settings.grpo.advantage_clip_high)
    data["advantages"] = expand_to_tokens(advantage, data["token_mask"])


def check_validation_prompts(val_prompts: Sequence[Prompt], settings: TrainerSettings) -> None:
    """Raises UserError if validation is asked for and there is nothing to validate on."""
    grpo = settings.grpo
    if (grpo.val_at_start or grpo.val_at_end or grpo.val_period > 0) and len(val_prompts) == 0:
        raise UserError(
            f"validation is on (grpo.val_at_start {grpo.val_at_start}, val_period {grpo.val_period}, val_at_end "
            f"{grpo.val_at_end}) but there is no validation set; give data.validation or switch these off"
        )


def finished(state: TrainingState, loader: Loader | Position, settings: TrainerSettings, started: float) -> str | None:
    """Why there is no further step, or None."""
    if state.step >= settings.grpo.max_num_steps:
        return f"max_num_steps {settings.grpo.max_num_steps} is reached"
    if loader.epoch >= settings.grpo.max_num_epochs:
        return f"max_num_epochs {settings.grpo.max_num_epochs} is reached"
    limit = settings.checkpointing.seconds_to_save_by
    if limit is not None and time.monotonic() - started >= limit:
        return f"checkpoint_must_save_by {settings.checkpointing.checkpoint_must_save_by} is reached"
    return None


def target_reached(validation: dict[str, float] | None, settings: TrainerSettings) -> str:
    """Why validation ends the run, or "".

    Raises:
        UserError: grpo.stop_at_validation_metric is none of the validation metrics.
    """
    name, threshold = settings.grpo.stop_at_validation_metric, settings.grpo.stop_at_validation_threshold
    if name is None or threshold is None or validation is None:
        return ""
    if name not in validation:
        reported = ", ".join(sorted(validation))
        raise UserError(f"grpo.stop_at_validation_metric is {name!r}; validation reports {reported}")
    return f"validation {name} {validation[name]:.4f} reached {threshold}" if validation[name] >= threshold else ""


def timing_metrics(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by phase: `timing/train/NAME`, and `timing/validation/total_validation_time`."""
    return {
        f"timing/{'validation' if name == 'total_validation_time' else 'train'}/{name}": value
        for name, value in seconds.items()
    }
