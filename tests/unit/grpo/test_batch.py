import pytest
import torch

from nemo_rl_dsv4.grpo.batch import (
    Rollouts,
    build_train_data,
    concatenate,
    count_valid,
    pad_prompts,
    padded_length,
    repeat_each,
    resize_sequence,
)


def rollouts(experts: bool = False) -> Rollouts:
    """Two prompts (2 and 1 tokens) with responses of 1 and 3 tokens; 99 and -7 stand where nothing may be read."""
    return Rollouts(
        prompt_ids=torch.tensor([[5, 6], [7, 0]]),
        prompt_lengths=torch.tensor([2, 1]),
        output_ids=torch.tensor([[5, 6, 11, 99, 99], [7, 21, 22, 23, 99]]),
        response_lengths=torch.tensor([1, 3]),
        logprobs=torch.tensor([[-7.0, -7.0, -0.1, -7.0, -7.0], [-7.0, -0.2, -0.3, -0.4, -7.0]]),
        truncated=torch.tensor([False, True]),
        rewards=torch.tensor([1.0, 0.0]),
        raw_rewards=torch.tensor([1.0, 0.0]),
        problems=("a", "b"),
        routed_experts=torch.arange(2 * 5 * 1 * 2).reshape(2, 5, 1, 2) if experts else None,
    )


def test_train_data_masks_only_response_tokens():
    """Prompt and padding get mask 0, logprob 0 and the padding id; the length is a multiple of 3."""
    data = build_train_data(rollouts(), pad_id=0, divisible_by=3, overlong_filtering=False)
    assert data["input_ids"].tolist() == [[5, 6, 11, 0, 0, 0], [7, 21, 22, 23, 0, 0]]
    assert data["input_lengths"].tolist() == [3, 4]
    assert data["token_mask"].tolist() == [[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert data["generation_logprobs"].tolist() == [
        pytest.approx([0, 0, -0.1, 0, 0, 0]),
        pytest.approx([0, -0.2, -0.3, -0.4, 0, 0]),
    ]
    assert data["sample_mask"].tolist() == [1.0, 1.0]
    assert data["token_mask"].dtype == torch.int64 and data["generation_logprobs"].dtype == torch.float32


def test_length_is_cut_to_the_longest_sequence():
    """An engine that pads to its own limit does not make the training batch longer."""
    data = build_train_data(rollouts(), pad_id=0, divisible_by=1, overlong_filtering=False)
    assert data["input_ids"].shape == (2, 4)


def test_overlong_filtering_masks_truncated_samples():
    data = build_train_data(rollouts(), pad_id=0, divisible_by=4, overlong_filtering=True)
    assert data["sample_mask"].tolist() == [1.0, 0.0]
    seqs, tokens = count_valid(data)
    assert (seqs.item(), tokens.item()) == (1.0, 1.0)


def test_routed_experts_are_padded_with_minus_one():
    data = build_train_data(rollouts(experts=True), pad_id=0, divisible_by=8, overlong_filtering=False)
    assert data["routed_experts"].shape == (2, 8, 1, 2)
    assert (data["routed_experts"][:, 5:] == -1).all()
    assert data["routed_experts"][1, 4].tolist() == [[18, 19]]


def test_select_and_concatenate_keep_rows_together():
    """Rows picked from batches of different lengths keep their tokens, logprobs and problems."""
    first = rollouts().select([1])
    second = Rollouts(
        prompt_ids=torch.tensor([[1, 2, 3]]),
        prompt_lengths=torch.tensor([3]),
        output_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 7]]),
        response_lengths=torch.tensor([4]),
        logprobs=torch.full((1, 7), -1.0),
        truncated=torch.tensor([False]),
        rewards=torch.tensor([0.5]),
        raw_rewards=torch.tensor([0.5]),
        problems=("c",),
    )
    joined = concatenate([first, second], pad_id=0)
    assert joined.problems == ("b", "c")
    assert joined.prompt_ids.tolist() == [[7, 0, 0], [1, 2, 3]]
    assert joined.output_ids.tolist() == [[7, 21, 22, 23, 99, 0, 0], [1, 2, 3, 4, 5, 6, 7]]
    assert joined.rewards.tolist() == [0.0, 0.5]
    with pytest.raises(ValueError, match="routed experts"):
        concatenate([rollouts(experts=True), second], pad_id=0)


def test_small_helpers():
    ids, lengths = pad_prompts([[1, 2, 3], [4]], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]] and lengths.tolist() == [3, 1]
    with pytest.raises(ValueError, match="at least one token"):
        pad_prompts([[1], []], pad_id=0)
    assert repeat_each(["a", "b"], 2) == ["a", "a", "b", "b"]
    assert [padded_length(n, 64) for n in (1, 64, 65)] == [64, 64, 128]
    assert resize_sequence(torch.ones(1, 3), 2, 0).shape == (1, 2)
