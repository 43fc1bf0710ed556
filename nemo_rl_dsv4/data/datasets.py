"""Datasets of problems, chosen by one key."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.word_problems import WordProblemSettings, make_problem
from nemo_rl_dsv4.errors import UserError

SPLITS = ("train", "validation")
COMMON_KEYS = ("dataset_name", "size", "seed")


class ProblemList(Sequence[Problem]):
    """Problems held in memory."""

    def __init__(self, name: str, problems: list[Problem]):
        if not problems:
            raise UserError(f"dataset {name} has no problems; choose another dataset or a larger size")
        self.name = name
        self.problems = problems

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index):
        return self.problems[index]


def build_dataset(spec: Mapping[str, Any], split: str, seed: int, size: int) -> ProblemList:
    """The problems that ``data.train`` or ``data.validation`` asks for.

    Args:
        spec: the section: ``dataset_name`` and the dataset's own settings.
        split: ``train`` or ``validation``.
        seed: the same seed gives the same problems.
        size: how many.

    Raises:
        UserError: an unknown dataset or setting (with the nearest valid one), or a dataset without problems.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split!r}; valid: {', '.join(SPLITS)}")
    if not isinstance(size, int) or size < 1:
        raise UserError(f"data.{split}.size is {size!r}; a dataset needs 1 problem or more")
    name = spec.get("dataset_name")
    settings = {key: value for key, value in spec.items() if key not in COMMON_KEYS}
    if name == "word_problems":
        return _word_problems(settings, split, seed, size)
    raise UserError(
        f"data.{split}.dataset_name is {name!r}; valid: word_problems{nearest(str(name), ['word_problems'])}"
    )


def nearest(found: str, valid: Sequence[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no valid name is near."""
    close = difflib.get_close_matches(found, valid, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_keys(found: Mapping[str, Any], valid: Sequence[str], where: str) -> None:
    """Refuse a setting that the dataset does not have."""
    for key in found:
        if key not in valid:
            raise UserError(f"{where}.{key} is not a setting{nearest(key, valid)}; valid: {', '.join(valid)}")


def _word_problems(settings: dict[str, Any], split: str, seed: int, size: int) -> ProblemList:
    fields = [field.name for field in dataclasses.fields(WordProblemSettings)]
    check_keys(settings, fields, f"data.{split}")
    checked = WordProblemSettings(**settings)
    seen: set[str] = set()
    problems: list[Problem] = []
    for index in range(50 * size):
        problem = make_problem(checked, split, f"{seed}/{split}/{index}")
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            problems.append(problem)
            if len(problems) == size:
                return ProblemList("word_problems", problems)
    raise UserError(
        f"data.{split}: word_problems found {len(problems)} different problems, not {size}; raise max_number or lower size"
    )
