"""Recipe files and their `defaults:` chain.

A file may name one parent or a list of them, relative to its own folder. Parents are read depth first, later ones win
over earlier ones, and the file itself wins over all. `_override_: true` inside a mapping replaces what the parents had
there instead of merging into it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_dsv4.config.nodes import child, is_plain_mapping
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

OVERRIDE_MARK = "_override_"


def load_layers(path: Path) -> list[tuple[Path, DictConfig]]:
    """The files of a recipe, weakest first, each without its `defaults:`.

    A file reached along two branches is listed twice, as each branch needs it at its own strength.

    Raises:
        UserError: a file is missing, unreadable, not a YAML mapping, or its own ancestor.
    """
    return _load(path.resolve(), chain=(), shown=path)


def merge_layers(layers: list[tuple[Path, DictConfig]]) -> DictConfig:
    """One mapping out of `load_layers`, whose `_override_` marks are used up; interpolations stay unresolved."""
    merged = DictConfig({})
    for path, layer in layers:
        _drop_overridden(merged, layer)
        try:
            _remove_marks(layer)
            _require_same_shape(merged, layer, path)
            merged.merge_with(layer)
        except OmegaConfBaseException as error:
            raise UserError(f"{path}: {_first_line(error)}") from error
    return merged


def _load(path: Path, chain: tuple[Path, ...], shown: Path) -> list[tuple[Path, DictConfig]]:
    if path in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(path) :], path))
        raise UserError(f"{shown}: `defaults:` runs in a circle ({names}); remove one of them")
    layer = _read(path, shown, chain)
    parents = layer.pop("defaults", None)
    layers: list[tuple[Path, DictConfig]] = []
    for parent in _parent_names(parents, shown):
        layers += _load((path.parent / parent).resolve(), (*chain, path), shown.parent / parent)
    return [*layers, (shown, layer)]


def _parent_names(parents: object, shown: Path) -> list[str]:
    names: list[object] = list(parents) if isinstance(parents, ListConfig) else [] if parents is None else [parents]
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise UserError(f"{shown}: `defaults:` holds {wrong[0]!r}; it takes a path or a list of paths")
    return [str(name) for name in names]


def _read(path: Path, shown: Path, chain: tuple[Path, ...]) -> DictConfig:
    asked_by = f" (named in `defaults:` of {chain[-1].name})" if chain else ""
    try:
        require_regular(path)
        layer = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise UserError(f"{shown}: no such recipe file{asked_by}{_similar_file(path)}") from error
    except IsADirectoryError as error:
        raise UserError(f"{shown} is a folder{asked_by}; name a recipe file in it") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise UserError(
            f"{shown}: not valid YAML{line}: {getattr(error, 'problem', None) or _first_line(error)}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{shown}: a YAML anchor refers to itself (&name ... *name inside it); remove it") from error
    except OSError as error:
        # OmegaConf itself raises a bare OSError for a file that holds a single number or word.
        raise UserError(f"{shown}: cannot read a recipe from it: {_first_line(error)}") from error
    if not isinstance(layer, DictConfig):
        raise UserError(f"{shown}: a recipe is a mapping of sections, this file holds a list")
    return layer


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent.name} does not exist either"
    names = sorted(p.name for p in path.parent.glob("*.yaml"))
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""


def _drop_overridden(merged: DictConfig, layer: DictConfig) -> None:
    """Removes from `merged` each section that `layer` marks with `_override_: true`."""
    for key in layer:
        value, below = child(layer, str(key)), child(merged, str(key))
        if not is_plain_mapping(value) or below is None:
            continue
        if value.get(OVERRIDE_MARK, False):
            merged.pop(key)
        elif is_plain_mapping(below):
            _drop_overridden(below, value)


def _require_same_shape(merged: DictConfig, layer: DictConfig, path: Path, prefix: str = "") -> None:
    """Raises UserError where `layer` has a list and the files before it a mapping, or the other way round."""
    for key in layer:
        value, below = child(layer, str(key)), child(merged, str(key))
        if is_plain_mapping(value) and is_plain_mapping(below):
            _require_same_shape(below, value, path, f"{prefix}{key}.")
        elif {type(value), type(below)} == {DictConfig, ListConfig} and not (value._is_none() or below._is_none()):
            found, wanted = ("list", "mapping") if isinstance(value, ListConfig) else ("mapping", "list")
            raise UserError(
                f"{path}: {prefix}{key} is a {found}, wanted a {wanted} as in the files that it inherits from"
            )


def _remove_marks(section: DictConfig) -> None:
    """Takes `_override_` out of `section` and everything below it."""
    section.pop(OVERRIDE_MARK, None)
    for key in section:
        value = child(section, str(key))
        if is_plain_mapping(value):
            _remove_marks(value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
