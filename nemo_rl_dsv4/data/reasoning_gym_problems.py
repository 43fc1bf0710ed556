"""Any reasoning-gym dataset as problems: ``dataset_name: reasoning_gym:<name>``, its own arguments under ``kwargs``.

The score is the dataset's own, given to what stands in ``\\boxed{}``; see ``nemo_rl_dsv4.environments``.
"""

import dataclasses
import hashlib
import warnings
from functools import cache
from typing import Any

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.spec import DatasetSpec, Exclude, nearest
from nemo_rl_dsv4.errors import UserError

PREFIX = "reasoning_gym:"
DEFAULT_SIZES = {"train": 4096, "validation": 512}
INSTRUCTION = "{}\nPut the final answer in \\boxed{{}}."
"""The prompt where no ``prompt_file`` is given: only a boxed answer is scored."""

_SEEDS_PER_SPLIT = 2**30


def reasoning_gym_problems(spec: DatasetSpec, exclude: Exclude) -> list[Problem]:
    """Draw ``spec.size`` problems, leaving out excluded questions.

    reasoning-gym makes item i of a dataset from the number seed + i. Training draws its numbers below 2**30 and
    validation its numbers above, so that they share none.

    Raises:
        UserError: an unknown dataset or argument (with the nearest valid one), or too few problems that are not
            excluded.
    """
    arguments = spec.generator_arguments()
    for key in ("seed", "size"):
        if key in arguments:
            raise UserError(f"{spec.where}.kwargs.{key}: write it as {spec.where}.{key}")
    name = spec.name.removeprefix(PREFIX)
    size = spec.size_or(DEFAULT_SIZES[spec.split])
    source = open_dataset(name, arguments, spec.where, seed=_first_seed(spec, 20 * size), size=20 * size)
    problems: list[Problem] = []
    for index in range(20 * size):
        entry = source[index]
        if exclude(entry["question"]):
            continue
        problems.append(_to_problem(spec.name, arguments, entry))
        if len(problems) == size:
            return problems
    raise spec.error(
        f"{spec.name} gave {len(problems)} problems that are not in the training set, of {size} wanted, in "
        f"{20 * size} tries; "
        "make the problems more varied through kwargs, or lower size"
    )


def open_dataset(name: str, arguments: dict[str, Any], where: str, **fixed: int) -> Any:
    """reasoning-gym's dataset `name`, its arguments checked.

    Raises:
        UserError: an unknown name or argument, or a value that the dataset refuses.
    """
    registered = _registered()
    if name not in registered:
        hint = nearest(name, list(registered))
        raise UserError(f"{where}.dataset_name: reasoning-gym has no dataset {name!r}{hint}; it has {len(registered)}")
    dataset_class, config_class = registered[name]
    valid = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    for key in arguments:
        if key not in valid:
            raise UserError(
                f"{where}.kwargs.{key} is not an argument of {PREFIX}{name}{nearest(key, valid)}; valid: "
                f"{', '.join(valid)}"
            )
    try:
        return dataset_class(config_class(**arguments, **fixed))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{where}.kwargs: {PREFIX}{name} refuses them: {error or type(error).__name__}") from error


@cache
def _registered() -> dict[str, tuple[type, type]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compiles with a warning
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    return DATASETS


def _first_seed(spec: DatasetSpec, span: int) -> int:
    digest = hashlib.sha256(f"{spec.seed}/{spec.name}".encode()).digest()
    offset = int.from_bytes(digest[:8], "big") % (_SEEDS_PER_SPLIT - span)
    return offset + (_SEEDS_PER_SPLIT if spec.split == "validation" else 0)


def _to_problem(name: str, arguments: dict[str, Any], entry: dict[str, Any]) -> Problem:
    answer = entry["answer"]
    worked = f"\\boxed{{ {answer} }}" if isinstance(answer, str) else None
    metadata = {"dataset": name, "kwargs": arguments, "entry": entry}
    return Problem(entry["question"], answer if isinstance(answer, str) else "", worked, metadata=metadata)
