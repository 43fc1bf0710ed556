"""What a boxed answer is worth. Call these in the main thread of a process that may be killed: see ``verifier``.

A request is a plain tuple, so that it can travel to such a process:

- ``("math", gold, answer)``: 1.0 if math-verify finds the two equal, else 0.0;
- ``("reasoning_gym", name, kwargs, entry, answer)``: the score of that dataset's own scorer, usually 0 to 1.
"""

from functools import lru_cache
from typing import Any

PARSE_SECONDS = 3
COMPARE_SECONDS = 3


def score_request(request: tuple) -> float:
    """The reward of one request; what a scorer cannot digest is worth 0."""
    kind, *arguments = request
    score = {"math": score_math, "reasoning_gym": score_reasoning_gym}[kind]
    try:
        return float(score(*arguments))
    except (Exception, MemoryError, RecursionError):  # sympy raises nearly anything on what a model writes
        return 0.0


def prepare(kind: str) -> None:
    """Import what requests of this kind need, so that the first is not slower than the others."""
    if kind == "math":
        score_math("1/2", "0.5")
    else:
        _dataset("chain_sum", ())


def score_math(gold: str, answer: str) -> float:
    """1.0 if two LaTeX answers are the same mathematical object, by math-verify, else 0.0.

    It limits its own time with SIGALRM, which Python allows in a main thread only.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_gold, parsed_answer = (
        parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=PARSE_SECONDS) for text in (gold, answer)
    )
    return float(verify(parsed_gold, parsed_answer, timeout_seconds=COMPARE_SECONDS))


def score_reasoning_gym(name: str, kwargs: dict[str, Any], entry: dict[str, Any], answer: str) -> float:
    """The dataset's own score of an answer to one of its entries."""
    return _dataset(name, tuple(sorted(kwargs.items(), key=repr))).score_answer(answer, entry)


def _dataset(name: str, arguments: tuple) -> Any:
    try:
        return _cached_dataset(name, arguments)
    except TypeError:  # an argument that is a list cannot be a cache key
        return _open(name, arguments)


def _open(name: str, arguments: tuple) -> Any:
    from nemo_rl_dsv4.data.reasoning_gym_problems import open_dataset

    return open_dataset(name, dict(arguments), "reasoning_gym", seed=0, size=1)


_cached_dataset = lru_cache(maxsize=16)(_open)
