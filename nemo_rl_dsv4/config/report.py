"""Turns what pydantic says about a recipe into one line that a user can act on."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_dsv4.config.key_names import hint
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.errors import UserError

WANTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping, such as {name: value}",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "none_required": "null",
}


def user_error(error: ValidationError, origin: Callable[[str], str]) -> UserError:
    """The first problem of `error` in full, and how many more there are.

    Args:
        origin: key path -> where the key was set, such as a file name.
    """
    details = error.errors(include_url=False, include_context=True)
    unknown_first = sorted(details, key=lambda d: d["type"] != "extra_forbidden")
    first = unknown_first[0]
    # One wrong value can be wrong in several places by interpolation: count values, not places.
    more = len({_path(d) for d in details if (d["type"], repr(d["input"])) != (first["type"], repr(first["input"]))})
    line = describe(first, origin)
    return UserError(line + (f" (and {more} more wrong {'key' if more == 1 else 'keys'})" if more else ""))


def describe(detail: ErrorDetails, origin: Callable[[str], str]) -> str:
    """One sentence: key path, where it was set, value found, value wanted."""
    path, kind = _path(detail), detail["type"]
    where = origin(path)
    where = f" (in {where})" if where else ""
    if kind == "extra_forbidden":
        return f"unknown key {path}{where}; {hint(MasterConfig, path)}"
    if kind == "missing":
        return f"{path} is missing; set it in the recipe, or inherit from grpo_dsv4.yaml with `defaults:`"
    return f"{path}{where} is {yaml_word(detail['input'])}, wanted {_wanted(detail)}"


def yaml_word(value: object) -> str:
    """A value as a recipe would write it."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in WANTED:
        return WANTED[kind]
    if kind == "literal_error":
        expected = str(context["expected"]).replace("False", "false").replace("True", "true")
        choices = expected.replace(" or ", ", ").split(", ")
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        return f"{words} {context[name]}"
    return detail["msg"][0].lower() + detail["msg"][1:]


def _path(detail: ErrorDetails) -> str:
    """The dotted key path; pydantic's markers of union members are left out."""
    return ".".join(str(part) for part in detail["loc"] if not _is_union_marker(part))


def _is_union_marker(part: int | str) -> bool:
    return isinstance(part, str) and (part in {"int", "float", "str", "bool", "none"} or "[" in part)
