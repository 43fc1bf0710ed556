"""Sections `grpo`, `loss_fn` and `reward_penalties`, with NeMo-RL's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_dsv4.config.section import Section

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class RewardScaling(Section):
    """Clamp a reward to the source interval, then map that interval linearly onto the target interval."""

    enabled: bool = False
    """Whether rewards are scaled."""
    source_min: float = 0.0
    """Lower end of the interval that rewards are clamped to."""
    source_max: float = 1.0
    """Upper end of the interval that rewards are clamped to."""
    target_min: float = 0.0
    """What `source_min` becomes."""
    target_max: float = 1.0
    """What `source_max` becomes."""


class RewardShaping(Section):
    """DAPO's soft punishment of responses that come near the length limit."""

    enabled: bool = False
    """Whether rewards are shaped by response length."""
    overlong_buffer_length: NonNegative | None = 128
    """Tokens before `max_response_length` over which the penalty grows from nothing to its full size."""
    overlong_buffer_penalty: float | None = 1.0
    """Size of the full penalty, in units of reward."""
    max_response_length: Positive | None = None
    """Longest response in tokens; needed when shaping is enabled."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Factor on the reward of a truncated response: 0 drops it, 1 keeps it. Null leaves truncation alone."""


class AdvEstimator(Section):
    """How rewards of one prompt's group become advantages."""

    name: Literal["grpo"] = "grpo"
    """The estimator; only group-relative advantages are here."""
    normalize_rewards: bool = True
    """Divide by the group's standard deviation where that is above zero."""
    use_leave_one_out_baseline: bool = True
    """Take each response's baseline from the other responses of its group."""
    minus_baseline: bool = True
    """A key of NeMo-RL's Reinforce++ estimator; without effect on `grpo`."""


class AsyncGRPO(Section):
    """Roll out the next batches while the policy trains on this one."""

    enabled: bool = False
    """False: rollout and training alternate."""
    max_trajectory_age_steps: Positive = 1
    """Updates that may lie between the weights a batch was sampled with and those it trains."""
    max_generation_failures: NonNegative = 0
    """A key of NeMo-RL's runtime; without effect in the embedded one, which restarts engines that die."""
    in_flight_weight_updates: bool = False
    """A key of NeMo-RL's runtime; refused by the embedded one, whose engines get weights between batches."""
    recompute_kv_cache_after_weight_updates: bool = False
    """A key of NeMo-RL's runtime; no cache outlives a batch of the embedded one."""


class GRPO(Section):
    """The algorithm's batch, schedule and advantage settings."""

    num_prompts_per_step: Positive = 32
    """Prompts in a step."""
    num_generations_per_prompt: Positive = 16
    """Responses sampled for each prompt; one group of the advantage estimator."""
    max_rollout_turns: Literal[1] = 1
    """Turns of a conversation; one question, one answer."""
    max_num_epochs: Positive = 1
    """Passes over the training data before the run ends."""
    max_num_steps: Positive = 1_000_000
    """Steps before the run ends."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation where that is above zero."""
    use_leave_one_out_baseline: bool = True
    """Take each response's baseline from the other responses of its group."""
    advantage_clip_low: float | None = None
    """Lower limit of an advantage; null for none."""
    advantage_clip_high: float | None = None
    """Upper limit of an advantage; null for none."""
    val_period: NonNegative = 10
    """Validate every so many steps; 0 turns periodic validation off."""
    val_start_at: Annotated[int, Field(ge=-1)] = -1
    """First step at which periodic validation may happen; -1 for no delay."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: Positive | None = 256
    """Validation prompts; null for the whole set."""
    val_batch_size: Positive | None = 256
    """Validation prompts generated at once; null for all."""
    val_num_generations_per_prompt: Positive = 1
    """Responses sampled for each validation prompt."""
    stop_at_validation_metric: str | None = None
    """End the run once this validation metric reaches its threshold; null for never."""
    stop_at_validation_threshold: float | None = None
    """The threshold of `stop_at_validation_metric`."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do not score with the reference policy; allowed when no KL penalty is used."""
    calculate_advantages_on_gpu: bool = False
    """Compute advantages on the accelerator."""
    seed: NonNegative = 42
    """Seed of data order, sampling and initialization."""
    use_dynamic_sampling: bool = False
    """DAPO: keep only prompts whose group of rewards varies, and sample on until the batch is full."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """Rollout batches that dynamic sampling may use for one step before it gives up with an error."""
    batch_multiplier: Annotated[float, Field(ge=1.0)] = 1.0
    """Dynamic sampling rolls out this many times `num_prompts_per_step` prompts at once."""
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss."""
    seq_logprob_error_threshold: Annotated[float, Field(gt=1.0)] | None = None
    """Leave out sequences whose mean exp|rollout - training logprob| is above this; null for none."""
    invalid_tool_call_advantage: None = None
    """Only null: there are no tool calls here."""
    malformed_thinking_advantage: float | None = None
    """Only null in the embedded runtime: responses are scored by their answer alone."""
    reward_scaling: RewardScaling = RewardScaling()
    """Linear reward scaling."""
    reward_shaping: RewardShaping = RewardShaping()
    """Length-dependent reward shaping."""
    adv_estimator: AdvEstimator = AdvEstimator()
    """Advantage estimator."""
    async_grpo: AsyncGRPO = AsyncGRPO()
    """Asynchronous mode."""


class ClippedPGLoss(Section):
    """Clipped policy-gradient loss with importance-sampling correction for the rollout."""

    reference_policy_kl_penalty: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of the KL term against the reference policy; 0 turns it off."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL term."""
    kl_input_clamp_value: Annotated[float, Field(gt=0.0)] | None = 20.0
    """Limit of the log ratio that enters the KL estimator; null for none."""
    kl_output_clamp_value: Annotated[float, Field(gt=0.0)] | None = 10.0
    """Limit of the estimate itself; null for none."""
    ratio_clip_min: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """The ratio is clipped from below at 1 minus this."""
    ratio_clip_max: Annotated[float, Field(ge=0.0)] = 0.2
    """The ratio is clipped from above at 1 plus this."""
    ratio_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clipping: the bound of the loss for negative advantages; null for none."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL term by the importance ratio of the current policy to the rollout."""
    use_importance_sampling_correction: bool = False
    """Weight the loss by the ratio of training to rollout probability."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """`tis` clamps the weight, `icepop` zeroes tokens outside the bounds, `seq-mask-tis` drops whole sequences."""
    truncated_importance_sampling_ratio: Annotated[float, Field(gt=0.0)] | None = None
    """Upper bound of the importance weight; null for none."""
    truncated_importance_sampling_ratio_min: Annotated[float, Field(ge=0.0)] | None = None
    """Lower bound of the importance weight; null means 0 for `tis`."""
    sequence_level_importance_ratios: bool = False
    """One importance ratio per sequence instead of per token (GSPO)."""
    token_level_loss: bool = True
    """Average over all tokens of the batch; false averages within each sequence, then over sequences."""
    force_on_policy_ratio: bool = False
    """Take the ratio to the policy before the update as 1; needs one update per rollout batch."""
    use_kl_in_reward: Literal[False] = False
    """Only ``false``: the KL term belongs to the loss."""
    use_cispo: Literal[False] = False
    """Only ``false``: CISPO is not implemented here."""
    disable_ppo_ratio: Literal[False] = False
    """Only ``false``: the ratio is part of the loss."""
    positive_example_nll_weight: Annotated[float, Field(ge=0.0, le=0.0)] = 0.0
    """Only 0: the extra likelihood term of VAPO is not implemented here."""


class RewardPenalties(Section):
    """NeMo-Gym's reward penalties: the keys are known, none may be on."""

    penalize_duplicated_reasoning: Literal[False] = False
    """Only ``false``."""
    penalize_empty_final_answer: Literal[False] = False
    """Only ``false``."""
    penalize_unwanted_tokens: Literal[False] = False
    """Only ``false``."""
    penalize_malformed_think_tag: Literal[False] = False
    """Only ``false``."""
    token_ids: None = None
    """Only null."""
