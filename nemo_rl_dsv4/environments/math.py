"""Rewards for problems with one right answer: 1 for a right answer in ``\\boxed{}``, 0 for anything else."""

import re
from collections.abc import Sequence
from typing import Any

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.environments.verifier import VerifierPool
from nemo_rl_dsv4.errors import UserError

_INTEGER = re.compile(r"[+-]?\d{1,100}")
_BOXED = "\\boxed{"


def last_boxed(response: str) -> str | None:
    """What the last ``\\boxed{...}`` of a response holds (braces balanced, outer spaces removed), or None without one."""
    start = response.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for index in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[index], 0)
        if depth == 0:
            return response[begin:index].strip()
    return None


class MathEnvironment:
    """Scores responses; a Ray actor can wrap it, and any thread may call it.

    Two whole numbers are compared as numbers. Everything else goes to math-verify in child processes with a deadline, so no response can
    block or crash training; a comparison that runs past it counts as wrong and in :attr:`timeouts`.
    """

    def __init__(self, num_workers: int = 1, timeout_seconds: float = 10.0):
        """
        Args:
            num_workers: child processes, started when the first answer needs one.
            timeout_seconds: deadline of one comparison.
        """
        if num_workers < 1:
            raise UserError(f"env.math.num_workers is {num_workers}; it must be 1 or more")
        if timeout_seconds <= 0:
            raise UserError(f"env.math.timeout_seconds is {timeout_seconds}; it must be above 0")
        self._verifier = VerifierPool(num_workers, timeout_seconds)

    @property
    def timeouts(self) -> int:
        """Comparisons so far that ran past the deadline."""
        return self._verifier.timeouts

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """One reward, 0.0 or 1.0, for each response.

        Args:
            problems: the problem of each response.
            responses: the generated text alone, without the prompt.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses; give one problem a response")
        rewards = [0.0] * len(problems)
        undecided: dict[tuple[str, str], list[int]] = {}
        for index, (problem, response) in enumerate(zip(problems, responses, strict=True)):
            boxed = last_boxed(response)
            if not boxed:
                continue
            gold = problem.answer.strip()
            if boxed == gold:
                rewards[index] = 1.0
            elif _INTEGER.fullmatch(boxed) and _INTEGER.fullmatch(gold):
                rewards[index] = float(int(boxed) == int(gold))
            else:
                undecided.setdefault((gold, boxed), []).append(index)
        for pair, equal in zip(undecided, self._verifier.compare(list(undecided)), strict=True):
            for index in undecided[pair]:
                rewards[index] = float(equal)
        return rewards

    def shutdown(self) -> None:
        """End the child processes."""
        self._verifier.close()

    def global_post_process_and_metrics(self, rewards: Sequence[float]) -> dict[str, Any]:
        """NeMo-RL's metric for a batch: the share of right answers."""
        return {"accuracy": sum(rewards) / len(rewards) if rewards else 0.0}
