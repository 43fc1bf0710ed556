"""How anything is changed in an AutoModel model from outside: a module's class gets a mixin in front.

`class Rounds(Seam): def forward(...): ... super().forward(...)` and `attach(module, Rounds, ...)`: the module's own
forward runs inside the seam's, so parameter names, state dicts, FSDP and activation checkpointing see the model they
know, and nothing of AutoModel's forward is repeated. The class keeps its name, by which AutoModel finds some of its own
modules. Where a step has no module of its own, AutoModel's function is
wrapped once a process (`wrap_function`) and does what it always did unless a seam has set a context variable around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.weight_rounding import WeightRounding

Value = TypeVar("Value")

engine_dtype: ContextVar[torch.dtype | None] = ContextVar("engine_dtype", default=None)
"""dtype of the activations around a module that is itself given float32; None outside such a module."""


class Seam:
    """Base of every mixin that `attach` puts in front of a module's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def attach(module: nn.Module, seam: type[Seam], **settings: Any) -> None:
    """Put `seam` in front of `module`'s class and store `settings` as attributes of the module.

    Raises:
        UserError: this seam is already there; a model is prepared once.
    """
    if isinstance(module, seam):
        raise UserError(f"{type(module).__name__} already has the seam {seam.__name__}; a model is prepared once")
    cls = type(module)
    names = {"__module__": cls.__module__, "__qualname__": f"{seam.__name__}.{cls.__qualname__}"}
    module.__class__ = type(cls.__name__, (seam, cls), names)
    for name, value in settings.items():
        setattr(module, name, value)


def wrap_function(namespace: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `namespace.name` by `wrap(original)` unless `wrap` already did so."""
    original = getattr(namespace, name)
    layer = original
    while layer is not None:
        if getattr(layer, "_wrapped_by", None) is wrap:
            return
        layer = getattr(layer, "__wrapped__", None)
    wrapped = functools.wraps(original)(wrap(original))
    wrapped._wrapped_by = wrap  # type: ignore[attr-defined]
    setattr(namespace, name, wrapped)


@contextmanager
def during(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable for a block of code; another thread does not see it."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def overlaid(module: Any, roundings: Mapping[str, WeightRounding]) -> Iterator[None]:
    """Let `module.<name>` return the rounded weight for the duration; the registered parameter stays in place."""
    for name, rounding in roundings.items():
        module.__dict__[name] = rounding(module._parameters[name])
    try:
        yield
    finally:
        for name in roundings:
            del module.__dict__[name]
