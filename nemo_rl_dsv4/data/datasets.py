"""Datasets of problems, chosen by one key, ``dataset_name``.

- ``word_problems``: two-step arithmetic (module ``word_problems``);
- ``reasoning_gym:<name>``: a reasoning-gym generator with its own scorer (module ``reasoning_gym_problems``);
- ``DAPOMath17K``, ``DAPOMathAIME2024``, ``AIME2024``, ``AIME2026``: published sets (module ``hub_problems``);
- ``ResponseDataset``: a JSON-lines file (module ``user_problems``);
- ``package.module.name``: a callable that returns problems (module ``user_problems``).
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from nemo_rl_dsv4.data.hub_problems import HUB_SETS, hub_problems
from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.reasoning_gym_problems import INSTRUCTION, PREFIX, reasoning_gym_problems
from nemo_rl_dsv4.data.spec import DatasetSpec, Exclude, fill_template, nearest, read_spec
from nemo_rl_dsv4.data.user_problems import FILE_NAME, callable_problems, file_problems
from nemo_rl_dsv4.data.word_problems import word_problems
from nemo_rl_dsv4.errors import UserError

NAMES = ("word_problems", PREFIX + "<name>", *HUB_SETS, FILE_NAME)
NEMO_RL_NAMES = ("AIME2025", "OpenMathInstruct-2", "DeepScaler", "gsm8k")
"""Built-in names of NeMo-RL that recipes use and that only its own runtime has."""


def build_dataset(section: Mapping[str, Any], split: str, seed: int, size: int | None = None) -> list[Problem]:
    """The problems of one section, ``data.train`` or ``data.validation``.

    Use :func:`build_datasets` for a run: it also keeps validation apart from training.

    Args:
        section: ``dataset_name``, optionally ``size``, ``seed``, ``prompt_file``, ``system_prompt_file``, ``kwargs``,
            and the dataset's own settings. Null counts as absent.
        split: ``train`` or ``validation``.
        seed: for a section without its own. The same seed gives the same problems.
        size: for a section without its own; None for the dataset's usual size.

    Raises:
        UserError: an unknown dataset or setting (with the nearest valid one), or a dataset without problems.
    """
    spec = read_spec(section, split, seed, size)
    return _present(spec, _questions(spec, lambda question: False))


def build_datasets(
    train: Mapping[str, Any], validation: Mapping[str, Any] | None, seed: int
) -> tuple[list[Problem], list[Problem] | None]:
    """Training and validation problems that share no question.

    Generators draw other validation problems in place of those that training has; ``word_problems`` shares not even
    operands. Published sets lose the training problems that validation has, and a warning counts them. With files and
    callables an overlap is the user's to remove.

    Raises:
        UserError: as :func:`build_dataset`, or a validation question that is also a training question.
    """
    train_spec = read_spec(train, "train", seed, None)
    train_problems = _questions(train_spec, lambda question: False)
    if validation is None:
        return _present(train_spec, train_problems), None
    seen = {problem.prompt for problem in train_problems}
    spec = read_spec(validation, "validation", seed, None)
    problems = _questions(spec, seen.__contains__)
    shared = [problem.prompt for problem in problems if problem.prompt in seen]
    if shared and train_spec.name in HUB_SETS:
        held_out = set(shared)
        train_problems = [problem for problem in train_problems if problem.prompt not in held_out]
        text = f"{len(held_out)} questions of data.validation are left out"
        if not train_problems:
            raise train_spec.error(f"{text}, and no other is there; use another set")
        warnings.warn(f"{train_spec.where}: {text}", stacklevel=2)
    elif shared:
        raise spec.error(
            f"{len(shared)} of {len(problems)} questions are also training questions, the first {shared[0][:60]!r}; "
            "remove them"
        )
    return _present(train_spec, train_problems), _present(spec, problems)


def _questions(spec: DatasetSpec, exclude: Exclude) -> list[Problem]:
    if spec.name == "word_problems":
        problems = word_problems(spec)
    elif spec.name.startswith(PREFIX):
        problems = reasoning_gym_problems(spec, exclude)
    elif spec.name in HUB_SETS:
        problems = hub_problems(spec)
    elif spec.name == FILE_NAME:
        problems = file_problems(spec)
    elif spec.name in NEMO_RL_NAMES:
        raise UserError(
            f"{spec.where}.dataset_name {spec.name!r} is read by NeMo-RL alone: run with runtime: nemo_rl, or save it "
            f"as a .jsonl file and use dataset_name: {FILE_NAME} with data_path"
        )
    elif "." in spec.name:
        problems = callable_problems(spec)
    else:
        valid = ", ".join((*NAMES, "or the dotted path of a callable"))
        raise UserError(
            f"{spec.where}.dataset_name is {spec.name!r}{nearest(spec.name, [*NAMES, *NEMO_RL_NAMES])}; valid: {valid}"
        )
    if not problems:
        raise spec.error(f"{spec.name} has no problems; choose another dataset or correct its settings")
    return problems


def _present(spec: DatasetSpec, problems: list[Problem]) -> list[Problem]:
    """Put the prompt file's text around each question, and the system prompt before it."""
    template = spec.template or (INSTRUCTION if spec.name.startswith(PREFIX) else None)
    if template is None and spec.system is None:
        return problems
    where = f"{spec.where}.prompt_file"
    return [
        dataclasses.replace(
            problem,
            prompt=fill_template(template, problem.prompt, where) if template else problem.prompt,
            system=spec.system or problem.system,
        )
        for problem in problems
    ]
