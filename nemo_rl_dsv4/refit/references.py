"""Who, beside a module itself, holds its tensors: kernels that keep scale objects, cached views, tables of a router.

A reload may put a new tensor in place of a parameter, or fill the old one while a rebuilt kernel keeps a third. Names
of the holders differ between engines and versions, so they are not listed but found: every object reachable from a
module is searched once, right after the engine loaded its checkpoint, for tensors that are a live parameter. The same
places must hold the live parameter after each refit.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Step = tuple[str, Any]
"""("attr", name) or ("item", key or index): one step from an object to what it holds."""

_MAX_DEPTH = 7
_MAX_VISITS = 3
_MAX_ITEMS = 64  # longer containers hold data, not kernels
_SKIPPED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "weight_loader"}
_OPAQUE = (
    torch.nn.Module,
    torch.dtype,
    torch.device,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


@dataclass(frozen=True)
class Reference:
    """One place that holds a parameter: a module's name, the steps from it, and the parameter's full name."""

    module: str
    steps: tuple[Step, ...]
    parameter: str

    def __str__(self) -> str:
        path = "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in self.steps)
        return f"{self.module}{path} (holds {self.parameter})"


def find_references(model: torch.nn.Module) -> list[Reference]:
    """Search every module's plain attributes, to a depth of 7, for tensors that are a live parameter or buffer.

    Only a tensor that starts where the parameter starts, with its dtype and shape, counts: a view of another shape is
    recomputed from the parameter by whoever made it.
    """
    owners = {_identity(tensor): name for name, tensor in live_tensors(model).items() if tensor.numel()}
    found = []
    for module_name, module in model.named_modules():
        for steps, tensor in _reachable(module):
            owner = owners.get(_identity(tensor))
            if owner is not None:
                found.append(Reference(module_name, steps, owner))
    return found


def reachable_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module holds in plain attributes, to a depth of 7, by module and path."""
    for module_name, module in model.named_modules():
        for steps, tensor in _reachable(module):
            path = "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in steps)
            yield f"{module_name}{path}", tensor


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by full name, shared ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def stale_references(model: torch.nn.Module, references: list[Reference]) -> list[Reference]:
    """Return the places that no longer hold the live parameter (or are gone)."""
    live = live_tensors(model)
    stale = []
    for reference in references:
        held = _get(model, reference)
        if not isinstance(held, torch.Tensor) or _identity(held) != _identity(live[reference.parameter]):
            stale.append(reference)
    return stale


def repoint(model: torch.nn.Module, references: list[Reference]) -> list[Reference]:
    """Make every stale place hold the live parameter; return those it changed.

    Places that are gone are left out: `stale_references` still names them.
    """
    live = live_tensors(model)
    changed = []
    for reference in stale_references(model, references):
        *way, (kind, key) = reference.steps
        holder = _follow(model.get_submodule(reference.module), way)
        if holder is None or _get(model, reference) is None:
            continue
        if kind == "attr":
            object.__setattr__(holder, key, live[reference.parameter])  # also through frozen dataclasses
        elif isinstance(holder, tuple):
            continue
        else:
            holder[key] = live[reference.parameter]
        changed.append(reference)
    return changed


def _identity(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _reachable(module: torch.nn.Module) -> Iterator[tuple[tuple[Step, ...], torch.Tensor]]:
    visits: Counter[int] = Counter()
    stack: list[tuple[tuple[Step, ...], Any]] = [
        ((("attr", name),), value) for name, value in vars(module).items() if name not in _SKIPPED_ATTRIBUTES
    ]
    while stack:
        steps, value = stack.pop()
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                yield steps, value
            continue
        if value is None or isinstance(value, _OPAQUE) or len(steps) > _MAX_DEPTH:
            continue
        # An object that two holders share has two places; one of them may be replaced alone later.
        visits[id(value)] += 1
        if visits[id(value)] > _MAX_VISITS:
            continue
        stack += [((*steps, step), inner) for step, inner in _children(value)]


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((("item", key), inner) for key, inner in value.items())
        return
    if isinstance(value, (list, tuple)):
        if len(value) <= _MAX_ITEMS:
            yield from ((("item", index), inner) for index, inner in enumerate(value))
        return
    for name, inner in getattr(value, "__dict__", {}).items():
        if name not in _SKIPPED_ATTRIBUTES:
            yield ("attr", name), inner


def _get(model: torch.nn.Module, reference: Reference) -> Any:
    return _follow(model.get_submodule(reference.module), reference.steps)


def _follow(start: Any, steps: Any) -> Any:
    """What the steps lead to, None where one leads nowhere."""
    value = start
    for kind, key in steps:
        try:
            value = getattr(value, key) if kind == "attr" else value[key]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return value
