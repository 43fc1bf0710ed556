"""Reading a dataset section: which keys it may hold, what they mean, and clear words about those it may not."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset section (``data.train`` or ``data.validation``) whose common keys are taken apart.

    Attributes:
        split: ``train`` or ``validation``; also the name in error messages.
        name: ``dataset_name``.
        seed: of the generator.
        size: problems wanted; None for the dataset's own size.
        template: text around the question, with ``{}`` where it goes, or None.
        system: the system prompt, or None.
        settings: what is left that is not null: the dataset's own settings.
    """

    split: str
    name: str
    seed: int
    size: int | None
    template: str | None
    system: str | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The section's dotted key."""
        return f"data.{self.split}"

    def error(self, message: str) -> UserError:
        """A user error that names the section."""
        return UserError(f"{self.where}: {message}")

    def size_or(self, default: int) -> int:
        """The size, or `default` where none is set."""
        return default if self.size is None else self.size

    def only(self, valid: Sequence[str]) -> dict[str, Any]:
        """The dataset's settings, after refusing any that is not one of `valid`."""
        for key in self.settings:
            if key not in valid:
                hint = nearest(key, valid)
                raise UserError(f"{self.where}.{key} is not a setting of {self.name}{hint}; valid: {', '.join(valid)}")
        return self.settings

    def generator_arguments(self, own: Sequence[str] = ()) -> dict[str, Any]:
        """The settings named in `own` together with everything under ``kwargs``."""
        settings = self.only([*own, "kwargs"])
        kwargs = settings.get("kwargs", {})
        if not isinstance(kwargs, Mapping):
            raise UserError(f"{self.where}.kwargs is {type(kwargs).__name__}; it must be a mapping of names to values")
        arguments = {key: value for key, value in settings.items() if key != "kwargs"}
        twice = arguments.keys() & kwargs.keys()
        if twice:
            raise UserError(f"{self.where}.{min(twice)} is set twice, here and under kwargs; keep one")
        return {**arguments, **kwargs}


Exclude = Callable[[str], bool]
"""Whether a question must not be used."""


def read_spec(section: Mapping[str, Any], split: str, seed: int, size: int | None) -> DatasetSpec:
    """Take a section apart. Keys that are null count as absent; the section's own seed and size win over the arguments.

    Raises:
        UserError: an unknown split, no dataset name, a size below 1, or a prompt file that cannot be used.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split!r}; valid: {', '.join(SPLITS)}")
    settings = {key: value for key, value in section.items() if value is not None}
    if isinstance(settings.get("kwargs"), Mapping) and not settings["kwargs"]:
        del settings["kwargs"]
    # NeMo-RL's choice of a text processor and an environment; both are fixed here.
    settings.pop("processor", None)
    settings.pop("env_name", None)
    name = settings.pop("dataset_name", None)
    if not isinstance(name, str) or not name:
        raise UserError(f"data.{split}.dataset_name is {name!r}; name a dataset, such as word_problems")
    seed, size = settings.pop("seed", seed), settings.pop("size", size)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise UserError(f"data.{split}.size is {size!r}; a dataset needs 1 problem or more")
    template = _read_text(settings.pop("prompt_file", None), f"data.{split}.prompt_file")
    if template is not None:
        fill_template(template, "", f"data.{split}.prompt_file")
    system = _read_text(settings.pop("system_prompt_file", None), f"data.{split}.system_prompt_file")
    return DatasetSpec(split, name, seed, size, template, system, settings)


def fill_template(template: str, question: str, where: str) -> str:
    """Put a question where a template has ``{}``; literal braces are doubled, as in NeMo-RL's prompt files."""
    marked = "\x00question\x00"
    try:
        filled = template.format(marked)
    except (IndexError, KeyError, ValueError) as error:
        raise UserError(f"{where}: bad braces ({error}); write {{}} for the question and double all others") from error
    if filled.count(marked) != 1:
        raise UserError(f"{where} holds {filled.count(marked)} places for the question; write {{}} once")
    return filled.replace(marked, question)


def nearest(found: str, valid: Sequence[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no valid name is near."""
    close = difflib.get_close_matches(found, valid, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _read_text(path: str | None, where: str) -> str | None:
    if path is None:
        return None
    try:
        require_regular(Path(path))
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} {path!r} cannot be read: {error}; give a text file") from error
