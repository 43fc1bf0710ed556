"""The base class of every configuration section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One mapping of a recipe: typed, read-only, and closed to keys that it does not declare.

    Values are checked strictly: the string ``"4"`` or the flag ``true`` is not an integer, an integer is a float, and
    infinity is no number.
    The string under a field is its documentation, and shows up in the JSON schema.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class DisabledSection(BaseModel):
    """A NeMo-RL feature that this package has no part in: its keys pass through, but it must stay off."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    enabled: Literal[False] = False
    """Only ``false``: the feature belongs to another backend of NeMo-RL."""


@dataclass(frozen=True)
class KeysOf:
    """Mark of an open mapping whose usual keys are those of a section: a wrong key's hint and the docs know them."""

    section: type[BaseModel]


PathName = Annotated[str, Field(min_length=1)]
"""A file or folder; an empty name would be the folder that a command is started in."""

OpenMapping = dict[str, Any]
"""A mapping that is handed on as it is, such as keyword arguments of somebody else's constructor."""
