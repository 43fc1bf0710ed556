"""Problems that the user brings: a JSON-lines file, or a Python callable named by its dotted path."""

import importlib
import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.spec import DatasetSpec, nearest
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

FILE_NAME = "ResponseDataset"
"""NeMo-RL's name for a local file of questions and answers."""


def file_problems(spec: DatasetSpec) -> list[Problem]:
    """The lines of ``data_path``: a JSON object each, question under ``input_key`` and answer under ``output_key``.

    With a size smaller than the file, a sample drawn with the seed.

    Raises:
        UserError: no file, a line that is not such an object (with its number), or fewer lines than the size.
    """
    settings = spec.only(("data_path", "input_key", "output_key"))
    if "data_path" not in settings:
        raise spec.error(f"{FILE_NAME} needs data_path, a .jsonl file")
    path = Path(settings["data_path"])
    keys = (settings.get("input_key", "input"), settings.get("output_key", "output"))
    try:
        require_regular(path)
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would cut texts at U+2028 as well
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{spec.where}.data_path {str(path)!r} cannot be read: {error}; give a .jsonl file") from error
    problems = [_from_line(line, f"{path}:{number}", keys) for number, line in enumerate(lines, 1) if line.strip()]
    return _sample(problems, spec)


def callable_problems(spec: DatasetSpec) -> list[Problem]:
    """What the callable at ``dataset_name: package.module.name`` returns.

    It is called with ``split``, ``seed``, ``size`` (None where unset) and the ``kwargs`` of the section, and returns
    :class:`~nemo_rl_dsv4.data.Problem` objects in a list or another iterable. The seed decides nothing else.

    Raises:
        UserError: a path that does not import, something that cannot be called so, or results that are not problems.
    """
    made = _import(spec)
    try:
        result = list(made(split=spec.split, seed=spec.seed, size=spec.size, **spec.generator_arguments()))
    except UserError:
        raise
    except TypeError as error:
        raise UserError(
            f"{spec.where}.dataset_name {spec.name!r} cannot be called with split, seed, size and kwargs: {error}"
            f"{_place(error)}"
        ) from error
    except Exception as error:  # whatever a user's function raises is theirs to correct
        raise UserError(
            f"{spec.where}.dataset_name {spec.name!r} raised {type(error).__name__}: {error}{_place(error)}; "
            "correct the function (--debug shows its traceback)"
        ) from error
    for index, item in enumerate(result):
        if not isinstance(item, Problem):
            raise spec.error(
                f"{spec.name} returned {type(item).__name__} as item {index}; return nemo_rl_dsv4.data.Problem objects"
            )
    return result if spec.size is None else result[: spec.size]


def _from_line(line: str, where: str, keys: tuple[str, str]) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}; correct or remove the line") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} holds {type(record).__name__}, not an object")
    for key in keys:
        if key not in record:
            raise UserError(f"{where} has no key {key!r}{nearest(key, list(record))}; set input_key and output_key")
    question, answer = (record[key] for key in keys)
    if not isinstance(question, str):
        raise UserError(f"{where}: {keys[0]} is {type(question).__name__}, not text")
    if not question.strip():
        raise UserError(f"{where}: {keys[0]} is {question!r}; wanted a question")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        text = repr(answer)
        found = text if len(text) <= 80 else f"{text[:80]}..."
        raise UserError(f"{where}: {keys[1]} is {found}; wanted an answer as text or number")
    return Problem(question, str(answer), metadata={"dataset": FILE_NAME, "source": where})


def _sample(problems: list[Problem], spec: DatasetSpec) -> list[Problem]:
    if spec.size is None or spec.size == len(problems):
        return problems
    if spec.size > len(problems):
        raise spec.error(f"size is {spec.size}, but the file has {len(problems)} problems; lower size or set null")
    return random.Random(spec.seed).sample(problems, spec.size)


def _place(error: BaseException) -> str:
    """`` at FILE:LINE`` of the innermost frame, unless that is here or in the import machinery."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames or frames[-1].filename in (__file__, importlib.__file__):
        return ""
    last = frames[-1]
    return "" if last.filename.startswith("<") else f" at {last.filename}:{last.lineno}"


def _import(spec: DatasetSpec) -> Callable[..., Any]:
    module_name, _, attribute = spec.name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise UserError(
            f"{spec.where}.dataset_name {spec.name!r}: cannot import {module_name} ({type(error).__name__}: {error})"
            f"{_place(error)}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name in dir(module) if not name.startswith("_")]
        raise UserError(
            f"{spec.where}.dataset_name {spec.name!r}: {module_name} has no callable "
            f"{attribute!r}{nearest(attribute, names)}"
        )
    return found
