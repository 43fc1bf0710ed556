import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_toy import (
    ALL_PROMPTS,
    Recorder,
    ToyEnvironment,
    ToyGeneration,
    ToyLoader,
    ToyPolicy,
    ToyTokenizer,
)

from nemo_rl_dsv4.config.metric_names import TRAIN_METRICS, validation_metrics
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import read_checkpoint
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.settings import (
    AdvantageSettings,
    CheckpointSettings,
    GRPOSettings,
    LossSettings,
    RewardScalingSettings,
    TrainerSettings,
)
from nemo_rl_dsv4.grpo.trainer import TrainingSummary, grpo_train
from nemo_rl_dsv4.routes import RouterTally

GRPO = GRPOSettings(
    num_prompts_per_step=8,
    num_generations_per_prompt=16,
    max_num_epochs=1000,
    max_num_steps=6,
    val_period=0,
    max_val_samples=None,
    val_batch_size=10,
    val_num_generations_per_prompt=8,
)
LOSS = LossSettings(reference_policy_kl_penalty=0.0, ratio_clip_max=0.28)
SETTINGS = TrainerSettings(
    grpo=GRPO,
    loss=LOSS,
    checkpointing=CheckpointSettings(save_period=2, metric_name=None),
    sequence_multiple=4,
    train_global_batch_size=64,
)


def train(
    settings: TrainerSettings, folder: Path | None = None, resume_from: Path | None = None, **parts: Any
) -> tuple[TrainingSummary, ToyPolicy, Recorder]:
    recorder = Recorder()
    policy = parts.get("policy") or ToyPolicy()
    summary = grpo_train(
        policy,
        parts.get("generation") or ToyGeneration(),
        parts.get("loader") or ToyLoader(settings.grpo.num_prompts_per_step),
        parts.get("val_prompts", ALL_PROMPTS),
        ToyTokenizer(),
        parts.get("environment") or ToyEnvironment(),
        recorder,
        settings,
        checkpoints=None if folder is None else CheckpointStore(folder, settings.checkpointing),
        resume_from=resume_from,
        phases=Phases(recorder),
    )
    return summary, policy, recorder


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """What a step computed; a resumed run exports the weights once more, so `refit/` may stand at another step."""
    return {
        name: value for name, value in metrics.items() if not name.startswith(("timing/", "performance/", "refit/"))
    }


def test_learns_from_rewards_alone():
    """A policy that starts at chance (about 1 in 40) is nearly always right after 20 steps of GRPO.

    Seen: 0.025 before, 0.98 after; the first and last five rewards average 0.14 and 0.95.
    """
    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=20, val_at_start=True, val_at_end=True))
    summary, _, recorder = train(settings)
    assert summary.first_validation is not None and summary.last_validation is not None
    assert summary.first_validation["accuracy"] < 0.1
    assert summary.last_validation["accuracy"] > 0.8
    rewards = [recorder.steps[step]["train/reward"] for step in range(1, 21)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4
    assert recorder.steps[0]["validation/accuracy"] == summary.first_validation["accuracy"]
    assert recorder.steps[20]["validation/accuracy"] == summary.last_validation["accuracy"]
    assert 0 < recorder.steps[20]["validation/accuracy_stderr"] < 0.1
    assert recorder.steps[20]["validation/num_samples"] == 25
    assert 1 >= recorder.steps[20]["validation/pass_k"] >= recorder.steps[20]["validation/accuracy"]


@pytest.mark.parametrize(
    "loss",
    [
        replace(LOSS, reference_policy_kl_penalty=0.02),
        replace(
            LOSS,
            token_level_loss=False,
            ratio_clip_c=10.0,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
        ),
    ],
)
def test_learns_with_other_losses(loss):
    """The reference recipe's loss (sequence mean, dual clip, TIS, rewards -1..1) and a KL penalty learn as well."""
    grpo = replace(
        GRPO,
        max_num_steps=12,
        adv_estimator=AdvantageSettings(normalize_rewards=True),
        reward_scaling=RewardScalingSettings(enabled=True, target_min=-1.0, target_max=1.0),
    )
    _, _, recorder = train(replace(SETTINGS, grpo=grpo, loss=loss))
    raw = [recorder.steps[step]["train/raw_reward"] for step in range(1, 13)]
    assert sum(raw[-3:]) / 3 > sum(raw[:3]) / 3 + 0.15
    for step, metrics in recorder.steps.items():
        assert metrics["train/reward"] == pytest.approx(2 * metrics["train/raw_reward"] - 1, abs=1e-6), step


def test_rollout_that_rounds_shows_in_the_mismatch_metrics():
    """An exact rollout has KL 0 (float32 noise); one that rounds to BF16 does not, and the mask threshold sees it.

    Case C092: both sides are compared on response tokens, with the weights of the rollout (before the two updates of
    the step) and at one temperature; with the weights after the updates the exact rollout would not give 0.
    """
    _, _, exact = train(replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1)))
    rounded_settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1, seq_logprob_error_threshold=1.002))
    _, _, rounded = train(rounded_settings, generation=ToyGeneration(torch.bfloat16))
    assert exact.steps[1]["train/gen_kl_error"] < 1e-12
    assert rounded.steps[1]["train/gen_kl_error"] > 1e-7
    assert (
        rounded.steps[1]["training/rollout_probs_diff_mean"] > 100 * exact.steps[1]["training/rollout_probs_diff_mean"]
    )
    assert 0 < rounded.steps[1]["train/num_masked_seqs_by_logprob_error"] < 128
    assert rounded.steps[1]["train/max_seq_mult_prob_error_after_mask"] <= 1.002
    assert exact.steps[1]["train/num_masked_seqs_by_logprob_error"] == 0


def test_resume_is_bitwise_the_uninterrupted_run(tmp_path):
    """Six steps at once, or four, a new process and two more: same weights, metrics, loader and random state."""
    settings = replace(SETTINGS, grpo=replace(GRPO, val_period=2))
    whole, whole_policy, whole_log = train(settings, tmp_path / "whole")
    first_settings = replace(settings, grpo=replace(settings.grpo, max_num_steps=4))
    train(first_settings, tmp_path / "parts")
    torch.manual_seed(12345)  # a new process knows nothing of the old one's random state
    store = CheckpointStore(tmp_path / "parts", settings.checkpointing)
    assert store.latest().name == "step_4"
    resumed, policy, log = train(settings, tmp_path / "parts", store.latest(), policy=ToyPolicy(seed=99))
    assert resumed.state == whole.state
    assert list(log.steps) == [5, 6]
    for step in (5, 6):
        assert without_times(log.steps[step]) == without_times(whole_log.steps[step])
    for name, value in whole_policy.model.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name]), name
    ends = [read_checkpoint(tmp_path / part / "step_6") for part in ("whole", "parts")]
    assert ends[0]["loader"] == ends[1]["loader"]
    assert ends[0]["rng"] == ends[1]["rng"]
    assert ends[0]["consumed_samples"] == 48


@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt(), RuntimeError("worker died"), OSError(28, "No space left")]
)
def test_interrupted_checkpoint_leaves_the_previous_one(tmp_path, interruption):
    """Ctrl-C, a crash or a full disk while the policy is being written: no half checkpoint, and resume goes on."""
    train(replace(SETTINGS, grpo=replace(GRPO, max_num_steps=2)), tmp_path)
    policy = ToyPolicy()
    policy.interrupt_save = interruption
    wanted = UserError if isinstance(interruption, OSError) else type(interruption)
    with pytest.raises(wanted):
        train(SETTINGS, tmp_path, tmp_path / "step_2", policy=policy)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    summary, _, log = train(SETTINGS, tmp_path, tmp_path / "step_2")
    assert list(log.steps) == [3, 4, 5, 6]
    assert [path.name for path in summary.checkpoints] == ["step_4", "step_6"]


def test_new_run_refuses_a_used_folder(tmp_path):
    train(replace(SETTINGS, grpo=replace(GRPO, max_num_steps=2)), tmp_path)
    with pytest.raises(UserError, match=r"already holds checkpoints \(step_2\).*--resume"):
        train(SETTINGS, tmp_path)
    without = replace(SETTINGS, checkpointing=replace(SETTINGS.checkpointing, enabled=False))
    train(without, tmp_path)  # mixes with nothing
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_finished_run_has_nothing_to_resume(tmp_path):
    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=2))
    train(settings, tmp_path)
    with pytest.raises(UserError, match="max_num_steps 2 is reached already"):
        train(settings, tmp_path, tmp_path / "step_2")


def test_refit_happens_once_for_each_change_of_weights():
    """Validation after a step exports the weights; the next rollout uses the same ones without a second export."""
    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=3, val_period=1, val_at_start=True))
    _, policy, recorder = train(settings)
    assert policy.exports == 4
    assert all(metrics["refit/tensors"] == 5 for metrics in recorder.steps.values())


def test_seeds_differ_between_steps_and_not_between_validations():
    """Every rollout draws new numbers; all validations draw the same ones, at the recipe's validation sampling."""
    generation = ToyGeneration()
    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=3, val_period=1))
    train(settings, generation=generation)
    rollouts = [call for call in generation.calls if "temperature" not in call]
    validations = [call for call in generation.calls if "temperature" in call]
    assert len({call["seed"] for call in rollouts}) == 3
    assert [call["seed"] for call in validations[:3]] == [call["seed"] for call in validations[3:6]]
    assert [call["rows"] for call in validations[:3]] == [80, 80, 40]
    assert validations[0]["temperature"] == 1.0 and validations[0]["top_p"] == 1.0


def test_metrics_line_has_the_names_readers_rely_on():
    _, _, recorder = train(replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1, val_at_end=True)))
    metrics = recorder.steps[1]
    wanted = """train/loss train/reward train/grad_norm train/lr train/gen_kl_error train/policy_kl_error
        train/js_divergence_error train/token_mult_prob_error train/sampling_importance_ratio train/approx_entropy
        train/probs_ratio train/probs_ratio_clamped train/mean_gen_tokens_per_sample train/truncation_rate
        validation/accuracy rollout_corr/kl training/rollout_probs_diff_mean timing/train/generation
        timing/train/policy_training timing/train/total_step_time timing/validation/total_validation_time
        performance/tokens_per_sec performance/tokens_per_sec_per_gpu train/advantages/mean"""
    assert [name for name in wanted.split() if name not in metrics] == []
    assert metrics["train/global_valid_seqs"] == 128
    assert metrics["train/num_valid_samples"] == pytest.approx(64.0)  # the mean of two updates of 64
    assert metrics["timing/train/total_step_time"] >= metrics["timing/train/policy_training"] > 0
    assert all(isinstance(value, float) for value in metrics.values())


def test_routes_reach_the_policy_and_its_tally_the_metrics():
    """C063: how far the trainer's experts agree with the rollout's is logged every step."""
    seen = []

    class Routed(ToyGeneration):
        def generate(self, data, **options):
            output = super().generate(data, **options)
            routes = torch.full((*output["output_ids"].shape, 2, 1), -1, dtype=torch.int16)
            routes[:, : data["input_ids"].shape[1]] = 3
            return output | {"routed_experts": routes}

    class Counting(ToyPolicy):
        def train(self, data, loss_fn):
            seen.append(data["routed_experts"])
            return super().train(data, loss_fn) | {"router": RouterTally(30.0, 5.0, 40.0, 50.0, 8.0, 1.0)}

    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1))
    _, _, recorder = train(settings, policy=Counting(), generation=Routed())
    names = ("router_overlap", "router_no_overlap_share", "router_missing_share", "router_hash_mismatches")
    assert [recorder.steps[1][f"train/{name}"] for name in names] == [0.75, 0.125, 0.16, 1.0]
    (routes,) = seen
    assert routes.shape[:2] == (128, 4) and (routes[:, :2] == 3).all() and (routes[:, 2:] == -1).all()


def test_progress_names_phases_and_always_ends_full():
    _, _, recorder = train(replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1, val_at_end=True)))
    names = [value[0] for kind, value in recorder.events if kind == "start"]
    assert names[:2] == ["prepare_for_generation/total", "generation"]
    assert names[-2:] == ["prepare_for_generation/total", "total_validation_time"]
    done = sum(value for kind, value in recorder.events if kind == "progress")
    total = sum(value[1] for kind, value in recorder.events if kind == "start")
    assert done == total > 0
    assert len(names) == sum(kind == "end" for kind, _ in recorder.events)
    assert recorder.events[-1] == ("step", 1)


def test_epochs_end_the_run(tmp_path):
    """25 prompts make three full batches of 8 an epoch."""
    summary, _, recorder = train(replace(SETTINGS, grpo=replace(GRPO, max_num_epochs=1, max_num_steps=99)), tmp_path)
    assert list(recorder.steps) == [1, 2, 3]
    assert "max_num_epochs" in summary.stop_reason
    assert summary.checkpoints[-1].name == "step_3"


def test_validation_target_ends_the_run():
    grpo = replace(
        GRPO, val_period=1, stop_at_validation_metric="accuracy", stop_at_validation_threshold=0.0, val_at_start=False
    )
    summary, _, recorder = train(replace(SETTINGS, grpo=grpo))
    assert list(recorder.steps) == [1] and "reached 0.0" in summary.stop_reason
    with pytest.raises(UserError, match="validation reports accuracy"):
        train(replace(SETTINGS, grpo=replace(grpo, stop_at_validation_metric="acuracy")))


def test_time_limit_saves_and_ends(tmp_path):
    checkpointing = CheckpointSettings(save_period=100, checkpoint_must_save_by="00:00:00:00")
    with pytest.raises(UserError, match="checkpoint_must_save_by"):
        train(replace(SETTINGS, checkpointing=checkpointing), tmp_path)
    checkpointing = CheckpointSettings(save_period=100, checkpoint_must_save_by="00:00:00:01")
    settings = replace(SETTINGS, checkpointing=checkpointing)
    summary, _, recorder = train(settings, tmp_path, environment=SlowEnvironment(1.1))
    assert list(recorder.steps) == [1]
    assert [path.name for path in summary.checkpoints] == ["step_1"]


class SlowEnvironment(ToyEnvironment):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score(self, problems, responses):
        time.sleep(self.seconds)
        return super().score(problems, responses)


def test_divergence_is_an_error_not_a_number():
    """A loss that is not finite stops the run; the checkpoint of the step before stays the last one."""

    class BrokenPolicy(ToyPolicy):
        def train(self, data, loss_fn):
            return {**super().train(data, loss_fn), "grad_norm": torch.tensor([1.0, torch.nan])}

    with pytest.raises(FloatingPointError, match="grad_norm"):
        train(SETTINGS, policy=BrokenPolicy())


def test_validation_without_a_set_is_refused():
    with pytest.raises(UserError, match="no validation set"):
        train(replace(SETTINGS, grpo=replace(GRPO, val_at_end=True)), val_prompts=[])


def test_checkpoint_metric_ranks_and_unknown_one_is_named(tmp_path):
    """`val:accuracy` lands in training_info.json; a name that the step does not report is an error that names it."""
    settings = replace(
        SETTINGS,
        grpo=replace(GRPO, max_num_steps=2, val_period=2),
        checkpointing=CheckpointSettings(save_period=1, metric_name="val:accuracy"),
    )
    _, _, recorder = train(settings, tmp_path)
    assert read_checkpoint(tmp_path / "step_2")["val:accuracy"] == recorder.steps[2]["validation/accuracy"]
    assert "val:accuracy" not in read_checkpoint(tmp_path / "step_1")
    wrong = replace(settings, checkpointing=CheckpointSettings(save_period=1, metric_name="train:rewards"))
    with pytest.raises(UserError, match=r"train:rewards.*train/rewards"):
        train(wrong, tmp_path / "other")


def test_every_metric_that_is_logged_has_a_known_name(tmp_path):
    """The recipe check refuses names that no step reports; its lists must hold all that are reported."""
    settings = replace(SETTINGS, grpo=replace(GRPO, max_num_steps=1, val_at_end=True, val_num_generations_per_prompt=2))
    _, _, log = train(settings, tmp_path)
    logged = {name for metrics in log.steps.values() for name in metrics}
    assert {name.removeprefix("train/") for name in logged if name.startswith("train/")} <= set(TRAIN_METRICS)
    validation = {name.removeprefix("validation/") for name in logged if name.startswith("validation/")}
    assert validation == set(validation_metrics(2))
    assert log.steps[1]["train/reward_stderr"] > 0
