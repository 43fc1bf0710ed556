"""Published sets of mathematical problems, by NeMo-RL's names: from the Hugging Face hub, or from a copy on disk.

``data_path`` names a copy: a ``.parquet``, ``.jsonl`` or ``.json`` file, a folder of such files, or a folder written by
``datasets.Dataset.save_to_disk``. Without it the set is downloaded once into the hub's cache (``HF_HOME``, or
``download_dir``); ``HF_HUB_OFFLINE=1`` takes it from there alone.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.spec import DatasetSpec, nearest
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

SETTINGS = ("data_path", "input_key", "output_key", "subset", "split", "download_dir")
"""Keys of a section that these sets read."""
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
"""Suffix of a file -> name of the reader in the datasets library."""
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class HubSet:
    """Where a set is published, and what its records hold.

    Attributes:
        hub_id: owner/name on the hub.
        question: field of the question: a text, or a list of chat messages whose one user message is the question.
        answer: field of the answer, dotted where it is nested.
        split: name of the only split that is read.
        subset: configuration of the set; None where it has one only.
    """

    hub_id: str
    question: str
    answer: str
    split: str = "train"
    subset: str | None = None


HUB_SETS: Mapping[str, HubSet] = {
    "DAPOMath17K": HubSet("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
    "DAPOMathAIME2024": HubSet("BytedTsinghua-SIA/AIME-2024", "prompt", "reward_model.ground_truth"),
    "AIME2024": HubSet("HuggingFaceH4/aime_2024", "problem", "answer"),
    "AIME2026": HubSet("MathArena/aime_2026", "problem", "answer"),
}
"""NeMo-RL's name -> set. The DAPO sets ask for a last line ``Answer: ...``: score them with ``dapo_math_verify``."""


def hub_problems(spec: DatasetSpec) -> list[Problem]:
    """The problems of one published set.

    Training drops records that repeat an earlier question (DAPO-Math-17k is published with every problem many times
    over) and questions with two answers, which a warning counts; validation keeps repeats, because AIME-2024 repeats
    each problem to average over answers. A size smaller than the set draws a sample with the seed.

    Raises:
        UserError: no such file, hub set or split; a missing field (with the nearest one there is); a record whose
            question or answer is not text; a validation question with two answers; fewer problems than the size.
    """
    known = HUB_SETS[spec.name]
    settings = spec.only(SETTINGS)
    question, answer = settings.get("input_key", known.question), settings.get("output_key", known.answer)
    records = _open(spec, known, settings)
    for key, field in (("input_key", question), ("output_key", answer)):
        top = field.partition(".")[0]
        if top not in records.column_names:
            raise spec.error(
                f"{spec.name} has no field {top!r}{nearest(top, records.column_names)}; it has "
                f"{', '.join(records.column_names)}: set {key}, or use a copy of {known.hub_id}"
            )
    records = records.select_columns(sorted({question.partition(".")[0], answer.partition(".")[0]}))
    problems: dict[str, Problem] = {}
    repeats: list[Problem] = []
    ambiguous: dict[str, str] = {}
    for number, record in enumerate(_rows(records)):
        where = f"{spec.name}, record {number}"
        text, gold = _question(record[question], f"{where}: {question}"), _answer(record, answer, where)
        first = problems.get(text)
        if first is None:
            problems[text] = Problem(text, gold, metadata={"dataset": spec.name, "source": where})
        elif first.answer != gold:
            ambiguous[text] = f"{first.metadata['source']} says {first.answer!r} and {where} {gold!r}"
        elif spec.split == "validation":
            repeats.append(first)
    _tell_ambiguous(spec, ambiguous)
    kept = [problem for problem in (*problems.values(), *repeats) if problem.prompt not in ambiguous]
    return _sample(kept, spec)


def _tell_ambiguous(spec: DatasetSpec, ambiguous: Mapping[str, str]) -> None:
    """Training leaves out questions with two answers and says so; validation refuses them."""
    if not ambiguous:
        return
    found = f"{len(ambiguous)} questions have two answers, the first: {next(iter(ambiguous.values()))}"
    if spec.split == "validation":
        raise spec.error(f"{found}; remove them")
    warnings.warn(f"{spec.where}: {found}; they are left out", stacklevel=3)


def is_local(section: Any) -> bool:
    """Whether a data section names a published set with a copy on disk, or no published set at all."""
    return section.dataset_name not in HUB_SETS or section.data_path is not None


def _open(spec: DatasetSpec, known: HubSet, settings: Mapping[str, Any]) -> Any:
    """The records as a ``datasets.Dataset``."""
    split, subset = settings.get("split", known.split), settings.get("subset", known.subset)
    cache = settings.get("download_dir")
    if "data_path" in settings:
        if "subset" in settings:
            raise spec.error(f"subset is {subset!r}, but a copy under data_path has no subsets; drop it")
        return _open_copy(spec, known, Path(settings["data_path"]).expanduser(), split, cache)
    import datasets

    return _guarded(
        spec,
        f"{known.hub_id} on the hub (split {split}{f', subset {subset}' if subset else ''})",
        "check the network and HF_HOME, or save a copy and set data_path",
        lambda: datasets.load_dataset(known.hub_id, subset, split=split, cache_dir=cache),
    )


def _open_copy(spec: DatasetSpec, known: HubSet, path: Path, split: str, cache: str | None) -> Any:
    import datasets

    where, fix = f"data_path {str(path)!r}", "give a .parquet, .jsonl or .json file, or a folder of them"
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        saved = _guarded(spec, where, "write it anew with save_to_disk", lambda: datasets.load_from_disk(str(path)))
        if not isinstance(saved, datasets.DatasetDict):
            _refuse_split(spec, known, where, split)
            return saved
        names = [str(name) for name in saved]
        if split not in names:
            raise spec.error(f"{where} has no split {split!r}{nearest(split, names)}; it has {', '.join(names)}")
        return saved[split]
    files = sorted(file for file in path.rglob("*") if file.suffix in FORMATS) if path.is_dir() else [path]
    suffixes = {file.suffix for file in files}
    if not files or not suffixes <= set(FORMATS):
        raise spec.error(f"{where} holds no set of problems; {fix}")
    if len(suffixes) > 1:
        raise spec.error(f"{where} mixes {', '.join(sorted(suffixes))} files; keep one kind")
    try:
        for file in files:
            require_regular(file)
    except OSError as error:
        raise spec.error(f"{where} cannot be read: {error}; {fix}") from error
    _refuse_split(spec, known, where, split)
    if not any(_holds_text(file) for file in files):
        raise spec.error(f"{where} is empty; {fix} with a problem in it")
    reader = FORMATS[suffixes.pop()]
    paths = [str(file) for file in files]
    return _guarded(
        spec,
        where,
        fix,
        lambda: datasets.load_dataset(reader, data_files={"train": paths}, split="train", cache_dir=cache),
    )


def _refuse_split(spec: DatasetSpec, known: HubSet, where: str, split: str) -> None:
    """Files and single sets have no splits to choose from."""
    if split != known.split:
        raise spec.error(f"split is {split!r}, but {where} holds one set alone; drop split")


def _holds_text(file: Path) -> bool:
    """Whether there is anything but white space in the first megabyte."""
    with file.open("rb") as opened:
        return bool(opened.read(1 << 20).strip())


def _guarded(spec: DatasetSpec, what: str, fix: str, load: Callable[[], Any]) -> Any:
    """What `load` returns; every failure of the library and its backends becomes one line."""
    try:
        return load()
    except Exception as error:  # httpx, pyarrow, fsspec and the library itself each raise their own
        raise spec.error(f"{what} cannot be loaded: {_cause(error)}; {fix}") from error


def _cause(error: BaseException) -> str:
    """First line of the error that began it: the library wraps what its readers raise in words of no help."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rows(records: Any) -> Iterator[dict[str, Any]]:
    for batch in records.iter(batch_size=_ROWS_AT_ONCE):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def _question(value: Any, where: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        if message.get("role") == "user" and isinstance(message.get("content"), str) and message["content"].strip():
            return message["content"]
    raise UserError(f"{where} is {_short(value)}; wanted a text, or a list of one user message")


def _answer(record: Mapping[str, Any], field: str, where: str) -> str:
    value: Any = record
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = list(value) if isinstance(value, Mapping) else []
            raise UserError(f"{where} has no field {field!r}{nearest(part, names)}; set output_key")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise UserError(f"{where}: {field} is {_short(value)}; wanted an answer as text or number")
    return str(value).strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _sample(problems: list[Problem], spec: DatasetSpec) -> list[Problem]:
    if spec.size is None or spec.size == len(problems):
        return problems
    if spec.size > len(problems):
        raise spec.error(f"size is {spec.size}, but {spec.name} has {len(problems)} problems; lower size or set null")
    return random.Random(spec.seed).sample(problems, spec.size)
