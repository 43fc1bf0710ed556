"""Engines behind NeMo-RL's generation interface: seeds by step and batch, validation told from training."""

import pytest
import torch
from upstream_fakes import Batch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.rollout import sampling_seed
from nemo_rl_dsv4.grpo.settings import ValidationSampling
from nemo_rl_dsv4.integrations.nemo_rl.generation import EngineGeneration, Refit, RolloutClock


class Engines:
    def __init__(self):
        self.calls, self.seeds, self.sampling = [], [], []

    def generate(self, data, *, greedy, seed, **sampling):
        self.seeds.append(seed)
        self.sampling.append(sampling)
        assert data["input_lengths"].dtype == torch.int64
        return {
            "output_ids": torch.tensor([[5, 6, 7]]),
            "generation_lengths": torch.tensor([1]),
            "unpadded_sequence_lengths": torch.tensor([3]),
            "logprobs": torch.tensor([[0.0, 0.0, -1.0]]),
            "truncated": torch.tensor([False]),
        }

    def prepare_for_generation(self):
        self.calls.append("prepare")

    def finish_generation(self):
        self.calls.append("finish")

    def shutdown(self):
        self.calls.append("shutdown")


REQUEST = Batch(
    input_ids=torch.tensor([[5, 6]]), input_lengths=torch.tensor([2], dtype=torch.int32), stop_strings=[None]
)
VALIDATION = ValidationSampling(temperature=0.5, top_p=0.7, top_k=None)


@pytest.fixture
def generation():
    return EngineGeneration(Engines(), RolloutClock(7, step=2), VALIDATION, Batch)


def train(generation, batches=1):
    """A step's rollouts as NeMo-RL's loop makes them."""
    for _ in range(batches):
        generation.prepare_for_generation()
        generation.clear_logger_metrics()
        generation.generate(REQUEST, greedy=False)
        generation.finish_generation()
    generation._clock.trained()


def validate(generation, batches=2):
    for _ in range(batches):
        generation.generate(REQUEST, greedy=False)
    generation.finish_generation()


def test_seeds_are_those_of_the_embedded_trainer(generation):
    """Resumed after step 2; dynamic sampling takes two batches of step 3; validation repeats its own numbers."""
    train(generation, batches=2)
    validate(generation)
    train(generation)
    validate(generation)
    held_out = [sampling_seed(7, "validation", 0, number) for number in (0, 1)]
    steps = [sampling_seed(7, "train", 3, 1), sampling_seed(7, "train", 3, 2)]
    assert generation._engines.seeds == [*steps, *held_out, sampling_seed(7, "train", 4, 1), *held_out]


def test_validation_samples_by_its_own_settings_and_training_by_the_engines(generation):
    train(generation)
    validate(generation, batches=1)
    assert generation._engines.sampling == [{}, {"temperature": 0.5, "top_p": 0.7, "top_k": None}]


def test_output_comes_in_the_loops_batch_type_and_is_checked(generation, monkeypatch):
    output = generation.generate(REQUEST, greedy=True)
    assert isinstance(output, Batch) and output["output_ids"].tolist() == [[5, 6, 7]]
    broken = {**output, "unpadded_sequence_lengths": torch.tensor([9])}
    monkeypatch.setattr(generation._engines, "generate", lambda *args, **kwargs: broken)
    with pytest.raises(ValueError, match="unpadded_sequence_lengths is 9"):
        generation.generate(REQUEST, greedy=False)


def test_stop_strings_of_single_prompts_are_refused(generation):
    with pytest.raises(UserError, match=r"stop strings of its own \(\['END'\]\)"):
        generation.generate(Batch(REQUEST, stop_strings=[["END"]]), greedy=False)


def test_a_refit_puts_the_policy_to_sleep_sends_and_wakes_the_engines(generation):
    order = generation._engines.calls

    class Policy:
        def finish_training(self):
            order.append("policy sleeps")

        def send_weights(self, kv_scales):
            order.append(("send", kv_scales))
            return {"bytes": 8.0}

    refit = Refit(Policy(), generation)
    assert refit.is_stale
    assert refit.sync_weights(timer=None) == {"bytes": 8.0}
    assert order == ["policy sleeps", ("send", None), "prepare"] and not refit.is_stale


def test_the_other_calls_of_the_interface_leave_nothing_to_wait_for(generation):
    assert generation.init_collective("host", 1, 2, train_world_size=1) == []
    assert generation.update_weights_via_ipc_zmq() == generation.update_weights_from_collective() == []
    assert generation.prepare_for_generation(tags=["weights"]) and generation.shutdown()
    assert generation._engines.calls == ["prepare", "shutdown"]
