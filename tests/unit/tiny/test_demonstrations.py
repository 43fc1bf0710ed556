"""Demonstrations for the warm start."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_rl_dsv4.data import Problem, build_dataset, encode_chat, make_tiny_tokenizer
from nemo_rl_dsv4.data.chat import prompt_messages
from nemo_rl_dsv4.environments import last_boxed
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.tiny.checkpoint import checkpoint_folder
from nemo_rl_dsv4.tiny.demonstrations import (
    DemonstrationLoss,
    demonstrate,
    demonstration_batch,
    similar_length_batches,
)

PROBLEM = Problem("?", "7", "16 - 7 = 9. 9 - 2 = 7. \\boxed{ 7 }")


def test_careless_answers_box_the_first_result():
    assert demonstrate(PROBLEM, 1.0, random.Random(0)) == "16 - 7 = 9. \\boxed{ 9 }"
    assert demonstrate(PROBLEM, 0.0, random.Random(0)) == PROBLEM.worked


def test_the_share_is_kept():
    rng = random.Random(0)
    careless = sum(last_boxed(demonstrate(PROBLEM, 0.4, rng)).strip() == "9" for _ in range(4000))
    assert careless / 4000 == pytest.approx(0.4, abs=0.024)  # three standard errors


def test_a_dataset_without_worked_answers_is_named():
    with pytest.raises(UserError, match="has no worked answers to imitate"):
        demonstrate(Problem("?", "7"), 0.0, random.Random(0))


def test_batches_mask_the_answer_and_its_end():
    tokenizer = make_tiny_tokenizer(12)
    problems = build_dataset({"dataset_name": "word_problems", "max_number": 12}, "train", 0, 6)

    def encode(problem):
        return tokenizer.encode(encode_chat(prompt_messages(problem.prompt)))

    batch = demonstration_batch(
        problems,
        encode,
        tokenizer.encode,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        careless_share=0.0,
        rng=random.Random(0),
    )
    for row, problem in enumerate(problems):
        trained = batch["input_ids"][row][batch["token_mask"][row].bool()].tolist()
        assert trained[-1] == tokenizer.eos_id
        assert tokenizer.decode(trained[:-1]) == problem.worked
        assert batch["input_ids"][row, : len(encode(problem))].tolist() == encode(problem)
        assert batch["input_lengths"][row] == len(encode(problem)) + len(trained)


def test_batches_hold_one_length_class_and_lose_nothing():
    problems = [Problem("long" if i % 4 == 3 else "short", str(i)) for i in range(8)]
    lengths = {"long": list(range(150)), "short": list(range(30))}
    batches = similar_length_batches(problems, lambda problem: lengths[problem.prompt], 3)
    found = [next(batches) for _ in range(8)]
    assert all(len({problem.prompt for problem in batch}) == 1 for batch in found)
    # Two rounds of the 8 problems and the beginning of a third: 6 short ones a round, 2 long ones.
    assert [problem.answer for batch in found[:2] for problem in batch] == ["0", "1", "2", "4", "5", "6"]
    assert [problem.answer for problem in next(b for b in found if b[0].prompt == "long")] == ["3", "7", "3"]


def test_loss_is_the_mean_negative_log_likelihood():
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])
    data = {"token_mask": torch.tensor([[0.0, 1, 1, 0], [0, 1, 0, 0]]), "sample_mask": torch.ones(2)}
    loss, metrics = DemonstrationLoss()(logprobs, data, global_valid_seqs=2, global_valid_tokens=3)
    assert float(loss) == pytest.approx(2.0) and metrics["loss"] == pytest.approx(2.0)


def test_the_folder_name_follows_the_settings():
    tokenizer = make_tiny_tokenizer(12)
    tiny = {"hidden_size": 128, "seed": 1, "cache_dir": "a", "warm_start": {"steps": 3}}
    one = checkpoint_folder(tiny, {"max_number": 12}, tokenizer)
    assert checkpoint_folder({**tiny, "cache_dir": "b"}, {"max_number": 12}, tokenizer).name == one.name
    assert checkpoint_folder({**tiny, "seed": 2}, {"max_number": 12}, tokenizer).name != one.name
    assert checkpoint_folder({**tiny, "warm_start": {"steps": 4}}, {"max_number": 12}, tokenizer).name != one.name
    assert checkpoint_folder(tiny, {"max_number": 13}, tokenizer).name != one.name
    assert checkpoint_folder(tiny, {"max_number": 12}, make_tiny_tokenizer(50)).name != one.name
