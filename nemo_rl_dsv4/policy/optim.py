"""Optimizer and learning-rate schedule from a recipe, by class path."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl_dsv4.errors import UserError


def load_class(path: str, key: str, base: type) -> type:
    """Import `module.Class`; `UserError` names the recipe key it came from, where it cannot be had or is no `base`."""
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{key} is {path!r}, which cannot be imported ({error}); wanted a class path") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key} is {path!r}, which is no {base.__module__}.{base.__qualname__}; wanted a subclass")
    return found


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], name: str, kwargs: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Make the optimizer `name` over the trainable parameters.

    Args:
        parameters: the model's; frozen ones (the indexer) stay out, so that weight decay does not move them.
        name: class path of a `torch.optim.Optimizer`, torch's or another package's.
        kwargs: its arguments; nulls are left out and lists become tuples, because YAML knows no tuples.

    Raises:
        UserError: the class cannot be imported, is no optimizer, or does not take the arguments.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items() if value is not None
    }
    cls = load_class(name, "policy.optimizer.name", torch.optim.Optimizer)
    try:
        return cls(trainable, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"policy.optimizer.kwargs do not fit {name}: {error}") from error


def build_scheduler(optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[str, Any]] | None) -> LRScheduler | None:
    """Make the learning-rate schedule.

    Args:
        optimizer: the optimizer it drives, stepped once per training step.
        parts: NeMo-RL's list: one `{name, kwargs}` per part, and as the last item `{milestones: [...]}` with the steps
            at which one part hands over to the next. None or empty keeps the rate constant.

    Raises:
        UserError: the number of milestones does not fit the number of parts, or a part cannot be made.
    """
    if not parts:
        return None
    named = [part for part in parts if part.get("name")]
    milestones = next((list(part["milestones"]) for part in parts if part.get("milestones") is not None), [])
    if len(milestones) != len(named) - 1:
        raise UserError(
            f"policy.scheduler has {len(named)} parts and {len(milestones)} milestones; "
            f"wanted {len(named) - 1} milestones"
        )
    schedulers = []
    for part in named:
        cls = load_class(str(part["name"]), "policy.scheduler.name", LRScheduler)
        try:
            schedulers.append(cls(optimizer, **dict(part.get("kwargs") or {})))
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UserError(f"policy.scheduler kwargs do not fit {part['name']}: {error}") from error
    if len(schedulers) == 1:
        return schedulers[0]
    try:
        return SequentialLR(optimizer, schedulers, milestones)
    except (TypeError, ValueError) as error:
        raise UserError(f"policy.scheduler: its parts do not make one schedule ({error})") from error


def rehearse(name: str, kwargs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None) -> None:
    """Make and step the recipe's optimizer and schedule once over a 2 x 2 weight on the CPU, before a process starts.

    Each part of the schedule is stepped by itself, since the later ones take over after many steps. Optimizers of
    other packages are made but not stepped: their kernels may need a GPU.

    Args:
        name: class path of the optimizer.
        kwargs: its arguments.
        parts: see `build_scheduler`.

    Raises:
        UserError: see `build_optimizer`, `build_scheduler`; or the trainer's `step()` is not one that they take.
    """

    def optimizer() -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2)
        return build_optimizer([weight], name, kwargs)

    made = optimizer()
    if name.startswith("torch.optim."):
        try:
            made.step()
        except (TypeError, RuntimeError) as error:
            raise UserError(
                f"policy.optimizer.name is {name!r}, which cannot take a step over dense gradients without a closure "
                f"({error}); wanted an optimizer such as torch.optim.AdamW"
            ) from error
    named = [part for part in parts or [] if part.get("name")]
    for part in named:
        alone = build_scheduler(optimizer(), [part])
        assert alone is not None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that no optimizer step came before
                alone.step()
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"policy.scheduler: {part['name']} with {dict(part.get('kwargs') or {})} cannot take a step ({error}); "
                "wanted a schedule that depends on the number of steps only"
            ) from error
    build_scheduler(made, parts)
