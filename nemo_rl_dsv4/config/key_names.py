"""The keys that a recipe may hold, and the nearest of them to a wrong one."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel

from nemo_rl_dsv4.config.section import DisabledSection, KeysOf


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as ``Section | None``; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        found = section_of(part)
        if found is not None:
            return found
    return None


def fields_of(section: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Key as written in YAML -> class of the subsection under it, or None where a value stands.

    An open mapping marked `KeysOf(section)` has that section's keys, and may have others.
    """
    return {
        info.alias or name: section_of(info.annotation)
        or next((mark.section for mark in info.metadata if isinstance(mark, KeysOf)), None)
        for name, info in section.model_fields.items()
    }


def key_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key path of a section, subsections before their keys."""
    for key, child in fields_of(section).items():
        yield prefix + key
        if child is not None and not issubclass(child, DisabledSection):
            yield from key_paths(child, f"{prefix}{key}.")


@cache
def _all_paths(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(key_paths(section))


def is_known(root: type[BaseModel], path: str) -> bool:
    """Whether the schema has this key path; anything may stand under an open mapping."""
    key, _, rest = path.partition(".")
    info = next((info for name, info in root.model_fields.items() if (info.alias or name) == key), None)
    if info is None:
        return issubclass(root, DisabledSection)
    child, kind = section_of(info.annotation), str(info.annotation)
    if child is not None and "list" in kind:
        # The next word is an index into the list.
        rest = rest.partition(".")[2]
    if not rest:
        return True
    return "dict" in kind if child is None else is_known(child, rest)


def nearest(root: type[BaseModel], path: str) -> str | None:
    """The valid key path that `path` most likely means, or None where no name is near.

    In this order: a very similar name in the same section, the same last name elsewhere, a similar name in the same
    section, this name in the section that was meant, a similar last name elsewhere, that section.
    """
    paths = _all_paths(root)
    parent, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == parent}
    same_name = [p for p in paths if p.rpartition(".")[2] == name]
    for cutoff in (0.8, 0.6):
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=cutoff)
        if near:
            return siblings[near[0]]
        if same_name:
            return max(same_name, key=lambda p: difflib.SequenceMatcher(None, p, path).ratio())
    meant = nearest(root, parent) if parent and not is_known(root, parent) else None
    if meant is not None and is_known(root, f"{meant}.{name}"):
        return f"{meant}.{name}"
    near = difflib.get_close_matches(name, {p.rpartition(".")[2] for p in paths}, n=1, cutoff=0.75)
    if near:
        candidates = [p for p in paths if p.rpartition(".")[2] == near[0]]
        return max(candidates, key=lambda p: difflib.SequenceMatcher(None, p, path).ratio())
    return meant


def hint(root: type[BaseModel], path: str) -> str:
    """How the message about an unknown key path ends: the nearest one, or where all are listed."""
    near = nearest(root, path)
    return f"did you mean {near}?" if near else "examples/configs/grpo_dsv4.yaml lists every key"
