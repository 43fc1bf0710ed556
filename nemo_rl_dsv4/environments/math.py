"""Rewards for problems with a right answer: what stands in ``\\boxed{}`` is scored, and nothing else.

With ``dapo_math_verify`` it is the line ``Answer: ...`` instead (module ``answer_line``).
"""

import re
from collections.abc import Sequence

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.environments.answer_line import answer_line, score_answer_line
from nemo_rl_dsv4.environments.verifier import VerifierPool
from nemo_rl_dsv4.errors import UserError

_INTEGER = re.compile(r"[+-]?\d{1,100}")
_BOXED = "\\boxed{"
_MAX_ANSWER_CHARACTERS = 2000
VERIFIERS = ("hf_math_verify", "dapo_math_verify")
"""Values of ``env.math.math_verify_impl``."""


def last_boxed(response: str) -> str | None:
    """What the last ``\\boxed{...}`` of a response holds, outer spaces removed; None without one that is closed.

    Braces inside must balance; ``\\{`` and ``\\}`` do not count.
    """
    start = response.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    index = begin
    while index < len(response):
        character = response[index]
        if character == "\\":
            index += 1  # whatever comes next is escaped
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return response[begin:index].strip()
        index += 1
    return None


class MathEnvironment:
    """Scores responses. Any thread may call it; a Ray actor can wrap it.

    - No box, an empty one, or one of more than 2,000 characters: 0.
    - Problems of a reasoning-gym dataset: the dataset's own score of what the last box holds.
    - All others: 1 if it equals the answer by math-verify, else 0. (Whole numbers and equal texts need no math-verify.)

    With ``verifier="dapo_math_verify"`` problems that are not reasoning-gym's are scored by their answer line alone.

    Scorers run in child processes with a deadline, so no response can block or crash training; one that runs past it is
    worth 0 and counts in :attr:`timeouts`.
    """

    def __init__(self, num_workers: int = 1, timeout_seconds: float = 10.0, verifier: str = "hf_math_verify"):
        """
        Args:
            num_workers: child processes, started when the first answer needs one.
            timeout_seconds: deadline of one answer.
            verifier: one of `VERIFIERS`.
        """
        if verifier not in VERIFIERS:
            raise UserError(f"env.math.math_verify_impl is {verifier!r}; wanted {' or '.join(VERIFIERS)}")
        if num_workers < 1:
            raise UserError(f"env.math.num_workers is {num_workers}; it must be 1 or more")
        if timeout_seconds <= 0:
            raise UserError(f"env.math.timeout_seconds is {timeout_seconds}; it must be above 0")
        self._verifier = VerifierPool(num_workers, timeout_seconds)
        self._reads_answer_line = verifier == "dapo_math_verify"

    @property
    def timeouts(self) -> int:
        """Answers so far that ran past the deadline."""
        return self._verifier.timeouts

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """One reward for each response.

        Args:
            problems: the problem of each response.
            responses: the generated text alone, without the prompt.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses; give one problem a response")
        rewards = [0.0] * len(problems)
        undecided: list[tuple[int, tuple]] = []
        for index, (problem, response) in enumerate(zip(problems, responses, strict=True)):
            if self._reads_answer_line and "entry" not in problem.metadata:
                rewards[index] = score_answer_line(problem.answer, response)
                continue
            boxed = last_boxed(response)
            if not boxed or len(boxed) > _MAX_ANSWER_CHARACTERS:
                continue
            decided = _score_or_request(problem, boxed)
            if isinstance(decided, tuple):
                undecided.append((index, decided))
            else:
                rewards[index] = decided
        scores = self._verifier.score([request for _, request in undecided])
        for (index, _), score in zip(undecided, scores, strict=True):
            rewards[index] = score
        return rewards

    def answer_of(self, response: str) -> str | None:
        """What the rule reads as the answer of a response; None where there is none."""
        return answer_line(response) if self._reads_answer_line else last_boxed(response)

    def shutdown(self) -> None:
        """End the child processes."""
        self._verifier.close()


def _score_or_request(problem: Problem, boxed: str) -> float | tuple:
    """The reward where it is plain, else the request that a scoring process must answer."""
    entry = problem.metadata.get("entry")
    if entry is not None:
        name = problem.metadata["dataset"].partition(":")[2]
        return ("reasoning_gym", name, problem.metadata["kwargs"], entry, boxed)
    gold = problem.answer.strip()
    if boxed == gold:
        return 1.0
    if _INTEGER.fullmatch(boxed) and _INTEGER.fullmatch(gold):
        return float(int(boxed) == int(gold))
    return ("math", gold, boxed)
