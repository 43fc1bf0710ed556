"""Worked answers to imitate before RL.

A share of them is careless: it does the first step of the problem right and boxes that intermediate result. So the warm
start knows the task's language and arithmetic but has a habit that costs reward, which is what reinforcement learning
is there to remove.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.errors import UserError

LENGTH_CLASS = 64

_FIRST_STEP = re.compile(r"^(?P<step>.*?= *(?P<result>-?\d+))\s*\.")


def demonstrate(problem: Problem, careless_share: float, rng: random.Random) -> str:
    """A worked answer to imitate; with probability `careless_share` it stops after the first step.

    Raises:
        UserError: the problem has no worked answer.
    """
    if problem.worked is None:
        raise UserError(
            f"dataset {problem.metadata.get('dataset')!r} has no worked answers to imitate; set "
            "policy.dsv4.tiny.warm_start.steps to 0 or train on word_problems"
        )
    if rng.random() >= careless_share:
        return problem.worked
    first = _FIRST_STEP.match(problem.worked)
    if first is None:
        return problem.worked
    return f"{first['step']}. \\boxed{{ {first['result']} }}"


def similar_length_batches(
    problems: Sequence[Problem], encode_prompt: Callable[[Problem], list[int]], batch_size: int
) -> Iterator[list[Problem]]:
    """Batches without end, in the order of `problems`, whose prompts have about the same length.

    A problem waits until `batch_size` problems of its length class (64 tokens wide) are there, so that no short row is
    padded to a long one.
    """
    waiting: dict[int, list[Problem]] = {}
    while True:
        for problem in problems:
            bucket = waiting.setdefault(len(encode_prompt(problem)) // LENGTH_CLASS, [])
            bucket.append(problem)
            if len(bucket) == batch_size:
                yield list(bucket)
                bucket.clear()


def demonstration_batch(
    problems: Sequence[Problem],
    encode_prompt: Callable[[Problem], list[int]],
    encode_text: Callable[[str], list[int]],
    *,
    eos_id: int,
    pad_id: int,
    careless_share: float,
    rng: random.Random,
) -> dict[str, torch.Tensor]:
    """Prompts with their demonstrations as a training batch.

    Returns:
        `input_ids` int64 [B, S] right-padded, `input_lengths` int64 [B], `token_mask` float32 [B, S] (1 on the answer
        and its end-of-sentence token), `sample_mask` float32 [B].
    """
    rows = []
    for problem in problems:
        prompt = encode_prompt(problem)
        rows.append((prompt, [*encode_text(demonstrate(problem, careless_share, rng)), eos_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : end] = 1.0
    return {
        "input_ids": ids,
        "input_lengths": torch.tensor([len(prompt) + len(answer) for prompt, answer in rows]),
        "token_mask": mask,
        "sample_mask": torch.ones(len(rows)),
    }


class DemonstrationLoss:
    """Mean negative log-likelihood of the masked tokens; the parts of micro-batches and ranks sum to it."""

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: dict[str, torch.Tensor],
        *,
        global_valid_seqs: float,
        global_valid_tokens: float,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of a micro-batch: `next_token_logprobs` [B, S - 1] against `token_mask` [B, S]."""
        del global_valid_seqs
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        loss = -(next_token_logprobs * mask).sum() / global_valid_tokens
        return loss, {"loss": float(loss.detach())}
