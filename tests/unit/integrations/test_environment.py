"""The environment as NeMo-RL's rollout loop calls it."""

from nemo_rl_dsv4.data import Problem
from nemo_rl_dsv4.environments.single_turn import environment_metadata
from nemo_rl_dsv4.integrations.nemo_rl.environment import EnvironmentActor, SilentEnvironment
from nemo_rl_dsv4.integrations.nemo_rl.patches import ENVIRONMENT_CLASS


def test_rewards_come_without_words_that_would_become_tokens_of_the_sequence():
    environment = SilentEnvironment({"num_workers": 1, "math_verify_impl": "hf_math_verify"})
    conversations = [
        [{"role": "user", "content": "1 + 1 ?"}, {"role": "assistant", "content": text}]
        for text in ("\\boxed{ 2 }", "\\boxed{ 3 }")
    ]
    metadata = [environment_metadata(Problem("1 + 1 ?", "2"))] * 2
    result = environment.step(conversations, metadata)
    environment.shutdown()
    assert result.rewards.tolist() == [1.0, 0.0] and result.terminateds.tolist() == [1.0, 1.0]
    assert result.observations == [{"role": "environment", "content": ""}] * 2
    observations, _, stops, *_ = result  # the loop unpacks it
    assert len(observations) == len(stops) == 2


def test_the_registered_name_is_the_actor_and_the_actor_holds_no_processor():
    module, _, name = ENVIRONMENT_CLASS.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is EnvironmentActor
    assert EnvironmentActor._default_options["num_cpus"] == 0
