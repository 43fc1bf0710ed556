"""Settings the GRPO loop reads, under NeMo-RL's key names.

Each class names the keys of one recipe section (`grpo`, `loss_fn`, `checkpointing`); defaults are those of NeMo-RL
main. The recipe schema lives elsewhere: :func:`read_section` copies the attributes over, so any object with these
attributes (a pydantic model, a plain namespace) will do, and a missing one is an error rather than a default.
"""

from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from nemo_rl_dsv4.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class LossSettings:
    """`loss_fn`: the clipped policy gradient loss."""

    token_level_loss: bool = True
    """True: mean over tokens. False: mean over the tokens of a sequence, then over sequences."""
    force_on_policy_ratio: bool = False
    """True: the ratio is exactly 1 (one update per rollout); previous logprobs are not needed."""
    sequence_level_importance_ratios: bool = False
    """True: one ratio per sequence (the geometric mean, as in GSPO)."""
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    """Dual clip for negative advantages; more than 1, None switches it off."""
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_on_policy_kl_approximation: bool = False
    """True: weight the KL term by exp(curr - generation)."""
    use_importance_sampling_correction: bool = False
    """True: weight the actor loss by exp(prev - generation)."""
    truncated_importance_sampling_type: str | None = None
    """tis | icepop | seq-mask-tis; needs `use_importance_sampling_correction`."""
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None

    def __post_init__(self) -> None:
        _require(
            self.ratio_clip_c is None or self.ratio_clip_c > 1,
            "loss_fn.ratio_clip_c",
            self.ratio_clip_c,
            "a number above 1, or null to switch the dual clip off",
        )
        _require(
            self.reference_policy_kl_type in ("k1", "k2", "k3"),
            "loss_fn.reference_policy_kl_type",
            self.reference_policy_kl_type,
            "k1, k2 or k3",
        )
        _require(
            not (self.sequence_level_importance_ratios and self.token_level_loss),
            "loss_fn.token_level_loss",
            True,
            "false, because sequence_level_importance_ratios is true",
        )
        self._check_truncation()

    def _check_truncation(self) -> None:
        kind, high, low = (
            self.truncated_importance_sampling_type,
            self.truncated_importance_sampling_ratio,
            self.truncated_importance_sampling_ratio_min,
        )
        key = "loss_fn.truncated_importance_sampling"
        if kind is None:
            _require(high is None, f"{key}_type", None, "tis, icepop or seq-mask-tis, because the ratio is set")
            return
        _require(kind in ("tis", "icepop", "seq-mask-tis"), f"{key}_type", kind, "tis, icepop, seq-mask-tis or null")
        _require(
            self.use_importance_sampling_correction,
            "loss_fn.use_importance_sampling_correction",
            False,
            f"true, because {key}_type is {kind}",
        )
        _require(high is not None and high > 0, f"{key}_ratio", high, "a number above 0")
        if kind != "tis":
            _require(low is not None, f"{key}_ratio_min", low, f"a number, because {key}_type is {kind}")
        if low is not None and high is not None:
            _require(low <= high, f"{key}_ratio_min", low, f"at most {key}_ratio = {high}")
        _require(
            not (kind == "seq-mask-tis" and self.sequence_level_importance_ratios),
            "loss_fn.sequence_level_importance_ratios",
            True,
            "false, because seq-mask-tis weights tokens and masks sequences",
        )


@dataclass(frozen=True)
class RewardScalingSettings:
    """`grpo.reward_scaling`: clamp to the source interval, then map linearly to the target interval."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.source_max > self.source_min,
            "grpo.reward_scaling.source_max",
            self.source_max,
            f"above source_min = {self.source_min}",
        )


@dataclass(frozen=True)
class RewardShapingSettings:
    """`grpo.reward_shaping`: DAPO's overlong penalty, or a factor on truncated responses."""

    enabled: bool = False
    overlong_buffer_length: int | None = None
    overlong_buffer_penalty: float | None = None
    max_response_length: int | None = None
    stop_properly_penalty_coef: float | None = None
    """0..1; when set, truncated responses keep this share of their reward and the overlong penalty is not used."""

    def __post_init__(self) -> None:
        coefficient = self.stop_properly_penalty_coef
        if coefficient is not None:
            key = "grpo.reward_shaping.stop_properly_penalty_coef"
            _require(0 <= coefficient <= 1, key, coefficient, "a number from 0 to 1")
        if not self.enabled or coefficient is not None:
            return
        for name, lowest in (("overlong_buffer_length", 1), ("overlong_buffer_penalty", 0), ("max_response_length", 1)):
            value = getattr(self, name)
            wanted = f"a number of at least {lowest}, because reward_shaping.enabled is true"
            _require(value is not None and value >= lowest, f"grpo.reward_shaping.{name}", value, wanted)


@dataclass(frozen=True)
class AdvantageSettings:
    """`grpo.adv_estimator`: wins over the keys of the same name in `grpo`, as in NeMo-RL main."""

    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True


@dataclass(frozen=True)
class AsyncSettings:
    """`grpo.async_grpo`: roll out the next batches while the policy trains on this one."""

    enabled: bool = False
    max_trajectory_age_steps: int = 1
    """Updates that may lie between the weights a batch was sampled with and those it trains."""

    def __post_init__(self) -> None:
        where, age = "grpo.async_grpo.max_trajectory_age_steps", self.max_trajectory_age_steps
        _require(age >= 1, where, age, "at least 1")


@dataclass(frozen=True)
class GRPOSettings:
    """`grpo`: sizes of a step, advantages, validation and when to stop."""

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_num_epochs: int = 1
    max_num_steps: int = 1_000_000
    adv_estimator: AdvantageSettings = field(default_factory=AdvantageSettings)
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    val_period: int = 10
    """Steps between validations; 0 switches the periodic ones off."""
    val_start_at: int = -1
    """First step at which the periodic validation may happen."""
    val_at_start: bool = False
    val_at_end: bool = False
    val_batch_size: int | None = 256
    """Validation problems generated at once; None for all."""
    max_val_samples: int | None = 256
    """Number of validation problems; None for the whole set."""
    val_num_generations_per_prompt: int = 1
    """Responses a validation problem; more than 1 also reports `pass_k`."""
    stop_at_validation_metric: str | None = None
    """End the run once this validation metric reaches `stop_at_validation_threshold`."""
    stop_at_validation_threshold: float | None = None
    skip_reference_policy_logprobs_calculation: bool = False
    overlong_filtering: bool = False
    """True: truncated responses do not enter the loss."""
    seq_logprob_error_threshold: float | None = None
    """Sequences whose mean exp|rollout - training| is above this do not enter the loss; None switches it off."""
    use_dynamic_sampling: bool = False
    """True: groups whose rewards are all equal are dropped and more prompts are rolled out until the batch is full."""
    dynamic_sampling_max_gen_batches: int = 10
    batch_multiplier: float = 1.0
    seed: int = 42
    reward_scaling: RewardScalingSettings = field(default_factory=RewardScalingSettings)
    reward_shaping: RewardShapingSettings = field(default_factory=RewardShapingSettings)
    async_grpo: AsyncSettings = field(default_factory=AsyncSettings)

    def __post_init__(self) -> None:
        for name in ("num_prompts_per_step", "num_generations_per_prompt", "max_num_epochs", "max_num_steps"):
            _require(getattr(self, name) >= 1, f"grpo.{name}", getattr(self, name), "at least 1")
        for name in ("val_num_generations_per_prompt", "dynamic_sampling_max_gen_batches"):
            _require(getattr(self, name) >= 1, f"grpo.{name}", getattr(self, name), "at least 1")
        for name in ("val_batch_size", "max_val_samples"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"grpo.{name}", value, "at least 1, or null for all problems")
        _require(
            (self.stop_at_validation_metric is None) == (self.stop_at_validation_threshold is None),
            "grpo.stop_at_validation_threshold",
            self.stop_at_validation_threshold,
            "set together with stop_at_validation_metric",
        )
        _require(self.val_period >= 0, "grpo.val_period", self.val_period, "0 (off) or a number of steps")
        _require(self.batch_multiplier >= 1, "grpo.batch_multiplier", self.batch_multiplier, "at least 1")


@dataclass(frozen=True)
class CheckpointSettings:
    """`checkpointing`: when checkpoints are written and which are kept."""

    enabled: bool = True
    checkpoint_dir: str = "results/grpo"
    save_period: int = 10
    metric_name: str | None = None
    """`val:NAME` or `train:NAME` ranks checkpoints; None ranks by age."""
    higher_is_better: bool = True
    keep_top_k: int | None = None
    """None keeps all; the newest is always kept."""
    checkpoint_must_save_by: str | None = None
    """Wall-clock `DD:HH:MM:SS` since the start by which a last checkpoint must be written and the run ends."""
    async_save: bool = True
    """True: training goes on while files are written; the state is copied first."""

    @property
    def seconds_to_save_by(self) -> float | None:
        """`checkpoint_must_save_by` in seconds; None when it is not set."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def __post_init__(self) -> None:
        _require(self.save_period >= 1, "checkpointing.save_period", self.save_period, "at least 1")
        kept = self.keep_top_k
        _require(kept is None or kept >= 1, "checkpointing.keep_top_k", kept, "at least 1, or null to keep all")
        parts = (self.checkpoint_must_save_by or "0:0:0:0").split(":")
        _require(
            len(parts) == 4 and all(part.isdecimal() for part in parts),
            "checkpointing.checkpoint_must_save_by",
            self.checkpoint_must_save_by,
            "DD:HH:MM:SS, for example 00:03:45:00, or null",
        )
        name = self.metric_name
        well_formed = name is None or (name.split(":", 1)[0] in ("val", "train") and ":" in name)
        _require(
            well_formed, "checkpointing.metric_name", name, "val:NAME, train:NAME or null, for example val:accuracy"
        )


@dataclass(frozen=True)
class ValidationSampling:
    """`policy.generation.val_*`: how validation samples."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the trainer reads of a recipe."""

    grpo: GRPOSettings = field(default_factory=GRPOSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    checkpointing: CheckpointSettings = field(default_factory=CheckpointSettings)
    validation_sampling: ValidationSampling = field(default_factory=ValidationSampling)
    sequence_multiple: int = 1
    """`policy.make_sequence_length_divisible_by`."""
    train_global_batch_size: int | None = None
    """`policy.train_global_batch_size`; None is not checked."""
    processes: int = 1
    """Training processes, for throughput per GPU."""
    config_yaml: str | None = None
    """The resolved recipe, kept in every checkpoint."""

    def __post_init__(self) -> None:
        penalty = self.loss.reference_policy_kl_penalty
        _require(
            not (self.grpo.skip_reference_policy_logprobs_calculation and penalty != 0),
            "grpo.skip_reference_policy_logprobs_calculation",
            True,
            f"false, because loss_fn.reference_policy_kl_penalty is {penalty}",
        )
        rows = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        size = self.train_global_batch_size
        _require(
            size is None or rows % size == 0,
            "policy.train_global_batch_size",
            size,
            f"a divisor of num_prompts_per_step x num_generations_per_prompt = {rows}",
        )
        _require(
            not self.loss.force_on_policy_ratio or size is None or size == rows,
            "policy.train_global_batch_size",
            size,
            f"{rows}, because loss_fn.force_on_policy_ratio needs one update per rollout",
        )

    @property
    def needs_prev_logprobs(self) -> bool:
        """False when the ratio is 1 by definition and no sequence is masked by its disagreement."""
        return not self.loss.force_on_policy_ratio or self.grpo.seq_logprob_error_threshold is not None

    @property
    def needs_reference_logprobs(self) -> bool:
        """Only a KL penalty reads them."""
        return self.loss.reference_policy_kl_penalty != 0

    @classmethod
    def from_config(cls, config: Any) -> "TrainerSettings":
        """Read a recipe: sections `grpo`, `loss_fn`, `checkpointing`, `policy`, and `world_size`, `resolved_yaml()`.

        Raises:
            UserError: a key is missing, out of range, or contradicts another.
        """
        generation = config.policy.generation
        return cls(
            grpo=read_section(GRPOSettings, config.grpo, "grpo"),
            loss=read_section(LossSettings, config.loss_fn, "loss_fn"),
            checkpointing=read_section(CheckpointSettings, config.checkpointing, "checkpointing"),
            validation_sampling=ValidationSampling(
                generation.val_temperature, generation.val_top_p, generation.val_top_k
            ),
            sequence_multiple=config.policy.make_sequence_length_divisible_by,
            train_global_batch_size=config.policy.train_global_batch_size,
            processes=config.world_size,
            config_yaml=config.resolved_yaml(),
        )


def read_section(kind: type[T], section: Any, name: str) -> T:
    """Copy the keys of the settings class `kind` out of a config section.

    Args:
        kind: one of the dataclasses above.
        section: any object with the keys as attributes.
        name: the section's name in the recipe, for messages.

    Raises:
        UserError: a key is missing, or a value is out of range.
    """
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if not hasattr(section, item.name):
            raise UserError(f"config section '{name}' has no key '{item.name}'; add {name}.{item.name} to the recipe")
        value = getattr(section, item.name)
        nested = None if item.default_factory is MISSING else item.default_factory
        if is_dataclass(nested):
            value = read_section(nested, value, f"{name}.{item.name}")  # type: ignore[type-var]
        values[item.name] = value
    return kind(**values)


def _require(holds: bool, key: str, found: object, wanted: str) -> None:
    if not holds:
        raise UserError(f"{key} is {found!r}; it must be {wanted}")
