from dataclasses import replace

import pytest
import torch
from grpo_toy import ALL_PROMPTS, ToyEnvironment, ToyGeneration, ToyLoader, ToyPolicy, ToyTokenizer

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.rollout import check_generation, gather_rollouts, roll_out, sampling_seed
from nemo_rl_dsv4.grpo.settings import GRPOSettings, RewardScalingSettings, RewardShapingSettings

GRPO = GRPOSettings(num_prompts_per_step=4, num_generations_per_prompt=8)


def engine() -> ToyGeneration:
    generation = ToyGeneration()
    ToyPolicy().export_to(generation)
    return generation


def gather(settings: GRPOSettings, environment=None, batch: int = 4):
    return gather_rollouts(
        ToyLoader(batch), engine(), environment or ToyEnvironment(), ToyTokenizer(), settings, Phases(), step=1
    )


def test_rows_of_a_prompt_stand_together_and_are_scored_as_text():
    """Four prompts, eight responses each; a reward of 1 exactly where the response spells the answer."""
    rollouts, metrics = gather(GRPO)
    assert rollouts.problems == tuple(p.problem for p in ToyLoader(4).next_batch() for _ in range(8))
    for row in range(32):
        ids = rollouts.output_ids[row, 2 : 2 + int(rollouts.response_lengths[row])].tolist()
        digits = [token for token in ids if token < 5]
        assert rollouts.rewards[row].item() == float(digits == [rollouts.problems[row]])
    assert metrics["reward"] == pytest.approx(rollouts.rewards.mean().item())


def test_dynamic_sampling_keeps_only_groups_that_differ():
    """Odd answers are never rewarded here: more batches are rolled out until four groups of even ones are left."""

    class EvenOnly(ToyEnvironment):
        def score(self, problems, responses):
            right = super().score(problems, responses)
            return [reward * (problem % 2 == 0) for reward, problem in zip(right, problems, strict=True)]

    settings = replace(GRPO, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=50)
    rollouts, metrics = gather(settings, EvenOnly())
    assert {problem % 2 for problem in rollouts.problems} == {0}
    assert len(rollouts) == 32
    for group in rollouts.rewards.reshape(4, 8):
        assert group.min() < group.max()
    assert metrics["dynamic_sampling_num_gen_batches"] > 1
    assert metrics["filtered_reward"] > metrics["reward"]
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] % 8 == 0


def test_dynamic_sampling_judges_before_length_shaping():
    """Groups that differ only by the length penalty carry no signal about the task and are dropped."""

    class AlwaysRight(ToyEnvironment):
        def score(self, problems, responses):
            return [1.0] * len(problems)

    settings = replace(
        GRPO,
        use_dynamic_sampling=True,
        dynamic_sampling_max_gen_batches=3,
        reward_shaping=RewardShapingSettings(
            enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=1.0, max_response_length=2
        ),
    )
    with pytest.raises(UserError, match=r"0 of 32 responses .*dynamic_sampling_max_gen_batches = 3 "):
        gather(settings, AlwaysRight())


def test_scaling_comes_before_shaping():
    """Reward 1 scaled to 1, minus half the penalty of a response of one token over a buffer of two."""

    class AlwaysRight(ToyEnvironment):
        def score(self, problems, responses):
            return [7.0] * len(problems)

    settings = replace(
        GRPO,
        reward_scaling=RewardScalingSettings(enabled=True, target_min=-1.0),
        reward_shaping=RewardShapingSettings(
            enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=1.0, max_response_length=2
        ),
    )
    rollouts, metrics = gather(settings, AlwaysRight())
    assert torch.equal(rollouts.rewards, 1.0 - rollouts.response_lengths / 2)
    assert metrics["num_rewards_clamped"] == 32
    assert rollouts.raw_rewards.tolist() == [7.0] * 32


def test_loader_that_gives_too_few_prompts_is_named():
    with pytest.raises(UserError, match=r"gave 3 prompts; grpo.num_prompts_per_step is 4"):
        gather(GRPO, batch=3)


def break_one_logprob(logprobs: torch.Tensor) -> torch.Tensor:
    broken = logprobs.clone()
    broken[1, 2] = torch.nan
    return broken


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("generation_lengths", lambda t: t + 1, "row 0: prompt 2"),
        ("truncated", lambda t: t[:-1], "shapes"),
    ],
)
def test_engine_output_that_does_not_fit_is_refused(name, change, message):
    """A wrong length or a NaN would train on other tokens than were sampled."""
    prompts = torch.tensor([p.token_ids for p in ALL_PROMPTS[:3]])
    lengths = torch.tensor([2, 2, 2])
    output = engine().generate({"input_ids": prompts, "input_lengths": lengths}, greedy=False, seed=1)
    check_generation(output, lengths)
    with pytest.raises(ValueError, match=message):
        check_generation({**output, name: change(output[name])}, lengths)
    with pytest.raises(ValueError, match=f"lacks .*{name}"):
        check_generation({key: value for key, value in output.items() if key != name}, lengths)


def test_a_logprob_that_is_no_number_names_its_token():
    """vLLM 0.26.0 gave NaN for the last tokens of a response that outlived all others; the run ended in a traceback."""
    prompts = torch.tensor([p.token_ids for p in ALL_PROMPTS[:3]])
    lengths = torch.tensor([2, 2, 2])
    output = engine().generate({"input_ids": prompts, "input_lengths": lengths}, greedy=False, seed=1)
    length = int(output["generation_lengths"][1])
    with pytest.raises(
        UserError, match=rf"logprob nan for token 1 of {length} of row 1 \(prompt of 2 tokens"
    ) as raised:
        check_generation({**output, "logprobs": break_one_logprob(output["logprobs"])}, lengths)
    assert "1 tokens of 1 rows" in str(raised.value) and str(int(output["output_ids"][1, 2])) in str(raised.value)


def test_routes_of_other_tokens_are_refused():
    prompts = torch.tensor([[1, 2], [3, 4]])
    lengths = torch.tensor([2, 2])
    output = engine().generate({"input_ids": prompts, "input_lengths": lengths}, greedy=False, seed=1)
    width = output["output_ids"].shape[1]
    check_generation(output | {"routed_experts": torch.zeros(2, width, 1, 1)}, lengths)
    with pytest.raises(ValueError, match="wanted .sequences, tokens, layers, experts a token"):
        check_generation(output | {"routed_experts": torch.zeros(2, width - 1, 1, 1)}, lengths)


def test_environment_that_returns_too_few_rewards_is_refused():
    class Short(ToyEnvironment):
        def score(self, problems, responses):
            return super().score(problems, responses)[1:]

    with pytest.raises(ValueError, match="31 rewards for 32"):
        roll_out(ALL_PROMPTS[:4], 8, engine(), Short(), ToyTokenizer(), Phases(), seed=0)


def test_sampling_seed_depends_on_every_argument():
    seeds = {
        sampling_seed(seed, purpose, step, batch)
        for seed in (0, 1)
        for purpose in ("train", "validation")
        for step in (1, 2)
        for batch in (1, 2)
    }
    assert len(seeds) == 16 and all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(42, "train", 1, 1) == sampling_seed(42, "train", 1, 1)
