"""The environment in the shape that NeMo-RL's rollout loop calls."""

import pytest
import torch

from nemo_rl_dsv4.data import Problem, build_dataset
from nemo_rl_dsv4.environments.single_turn import SingleTurnEnvironment, environment_metadata


@pytest.fixture
def turns(environment):
    made = SingleTurnEnvironment({"num_workers": 1})
    made.scorer = environment
    return made


def conversation(*responses):
    return [{"role": "user", "content": "?"}] + [{"role": "assistant", "content": text} for text in responses]


def test_step_returns_batched_fields(turns):
    metadata = [environment_metadata(Problem("", "7", metadata={"dataset": "x"}))] * 3
    turn = turns.step([conversation(r"\boxed{7}"), conversation("7"), conversation("a ", r"\boxed{8}")], metadata)
    assert turn.rewards.dtype == torch.float32 and turn.rewards.tolist() == [1.0, 0.0, 0.0]
    assert turn.terminateds.tolist() == [1.0, 1.0, 1.0]
    assert turn.answers == ["7", None, "8"]
    assert turn.metadata == metadata and turn.next_stop_strings == [None] * 3
    assert [o["content"] for o in turn.observations] == ["Environment: correct"] + ["Environment: incorrect"] * 2


def test_step_uses_the_scorer_of_a_reasoning_gym_problem(turns):
    problem = build_dataset({"dataset_name": "reasoning_gym:countdown"}, "train", 0, 1)[0]
    turn = turns.step([conversation(problem.worked)], [environment_metadata(problem)])
    assert turn.rewards.tolist() == [1.0]


def test_metrics_give_no_reward_to_a_response_that_did_not_end(turns):
    batch = {
        "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "is_end": torch.tensor([True, False, True, True]),
        "generation_lengths": torch.tensor([4, 8, 4, 4]),
        "prompt_lengths": torch.tensor([2, 2, 2, 6]),
    }
    after, metrics = turns.global_post_process_and_metrics(batch)
    assert after["rewards"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert metrics == {
        "accuracy": 0.5,
        "fraction_of_samples_properly_ended": 0.75,
        "num_problems_in_batch": 4,
        "generation_lengths": 5.0,
        "prompt_lengths": 3.0,
    }
