"""Rolling out ahead of training: how old weights may be, who waits for whom, what a checkpoint notes."""

import threading
from dataclasses import replace

import pytest
from grpo_toy import ToyGeneration, ToyLoader, ToyPolicy
from test_trainer import GRPO, LOSS, SETTINGS, train, without_times

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.rollout import StepRollouts
from nemo_rl_dsv4.grpo.rollout_source import Ahead
from nemo_rl_dsv4.grpo.settings import AsyncSettings

CORRECTED = replace(LOSS, use_importance_sampling_correction=True)


def ahead(age: int, **grpo):
    return replace(SETTINGS, loss=CORRECTED, grpo=replace(GRPO, async_grpo=AsyncSettings(True, age), **grpo))


class Watched(ToyGeneration):
    """Notes which weights each training batch was sampled with, and weights that come while it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.busy, self.disturbed, self.versions = 0, False, False, []

    def load(self, model) -> None:
        self.disturbed |= self.busy
        self.loads += 1
        super().load(model)

    def generate(self, data, **options):
        self.disturbed |= self.busy
        self.busy = True
        if threading.current_thread().name.startswith("rollout"):
            self.versions.append(self.loads)
        try:
            return super().generate(data, **options)
        finally:
            self.busy = False


@pytest.mark.parametrize("age", [1, 2, 3])
def test_no_batch_is_older_than_allowed(age: int) -> None:
    generation = Watched()
    _, policy, recorder = train(ahead(age, max_num_steps=7), generation=generation)
    ages = [recorder.steps[step]["train/trajectory_age"] for step in range(1, 8)]
    assert ages[0] == 0.0 and max(ages) == float(age)
    assert not generation.disturbed
    assert len(generation.versions) == 7
    assert policy.exports == generation.loads < 8
    assert all("timing/train/background/generation" in recorder.steps[step] for step in range(1, 8))
    assert recorder.steps[3]["performance/generation_tokens_per_sec"] > 0


def test_with_a_policy_that_stands_still_it_is_the_alternating_run() -> None:
    """Age changes the weights a batch is sampled with and nothing else: seeds, prompts and order are the same."""
    alternating = replace(SETTINGS, loss=CORRECTED)
    _, _, one = train(alternating, policy=ToyPolicy(lr=0.0))
    _, _, two = train(ahead(2), policy=ToyPolicy(lr=0.0))
    for step in range(1, 7):
        found = without_times(two.steps[step])
        found.pop("train/trajectory_age")
        assert found == without_times(one.steps[step])


def test_learns_from_batches_that_are_one_update_old() -> None:
    _, _, recorder = train(ahead(1, max_num_steps=20))
    rewards = [recorder.steps[step]["train/reward"] for step in range(1, 21)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4


def test_validation_waits_for_the_batches_under_way() -> None:
    generation = Watched()
    summary, _, _ = train(ahead(3, val_period=2, val_at_start=True, val_at_end=True), generation=generation)
    assert summary.last_validation is not None and not generation.disturbed


def test_a_checkpoint_does_not_know_batches_nobody_trained_on(tmp_path) -> None:
    """The loader has gone on to the next batches; the checkpoint notes where it was after the batch of its step."""
    settings = ahead(2, max_num_steps=4)
    _, _, whole = train(settings, policy=ToyPolicy(lr=0.0))
    train(ahead(2, max_num_steps=2), tmp_path, policy=ToyPolicy(lr=0.0))
    latest = CheckpointStore(tmp_path, settings.checkpointing).latest()
    assert latest.name == "step_2"
    _, _, rest = train(settings, tmp_path, latest, policy=ToyPolicy(lr=0.0))
    assert rest.steps[3]["train/trajectory_age"] == 0.0  # sampled anew, with the weights of the checkpoint
    for step in (3, 4):
        left, right = without_times(whole.steps[step]), without_times(rest.steps[step])
        assert left.pop("train/trajectory_age") >= right.pop("train/trajectory_age")
        assert left == right


def test_an_error_while_rolling_out_ends_the_run() -> None:
    class Broken(ToyGeneration):
        def generate(self, data, **options):
            if len(self.calls) == 2:
                raise UserError("the engine is gone")
            return super().generate(data, **options)

    with pytest.raises(UserError, match="the engine is gone"):
        train(ahead(1), generation=Broken())


def test_closing_drops_batches_that_have_not_begun() -> None:
    begun, go_on = [], threading.Event()

    def gather(step: int, phases: Phases) -> StepRollouts:
        begun.append(step)
        if step > 1:
            go_on.wait(10)
        return StepRollouts(None, {"reward": float(step)})  # type: ignore[arg-type]

    source = Ahead(gather, lambda: None, ToyLoader(8), Phases(), max_age=3, last_step=9)
    assert source.batch(1).metrics == {"reward": 1.0, "trajectory_age": 0.0}
    source.close()
    go_on.set()
    assert set(begun) <= {1, 2} and source.position().epoch == 0


def test_an_age_of_zero_is_no_asynchronous_run() -> None:
    with pytest.raises(UserError, match="max_trajectory_age_steps is 0; it must be at least 1"):
        AsyncSettings(True, 0)
