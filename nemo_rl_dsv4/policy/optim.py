"""Optimizer and learning-rate schedule from a recipe, by class path."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl_dsv4.errors import UserError


def load_class(path: str, key: str) -> type:
    """Import `module.Class`; `UserError` names the recipe key it came from."""
    module_name, _, class_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key} is {path!r}, which cannot be imported ({error}); wanted a class path") from error


def build_optimizer(parameters: Iterable[torch.nn.Parameter], name: str, kwargs: Mapping[str, Any]):
    """Make the optimizer `name` over the trainable parameters."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    options = {key: value for key, value in kwargs.items() if value is not None}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    try:
        return load_class(name, "policy.optimizer.name")(trainable, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"policy.optimizer.kwargs do not fit {name}: {error}") from error


def build_scheduler(optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[str, Any]] | None) -> LRScheduler | None:
    """Make the learning-rate schedule.

    Args:
        optimizer: the optimizer it drives, stepped once per training step.
        parts: NeMo-RL's list: one `{name, kwargs}` per part, and as the last item `{milestones: [...]}` with the steps
            at which one part hands over to the next. None or empty keeps the rate constant.

    Raises:
        UserError: the number of milestones does not fit the number of parts.
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
        cls = load_class(str(part["name"]), "policy.scheduler.name")
        try:
            schedulers.append(cls(optimizer, **dict(part.get("kwargs") or {})))
        except (TypeError, ValueError) as error:
            raise UserError(f"policy.scheduler kwargs do not fit {part['name']}: {error}") from error
    return schedulers[0] if len(schedulers) == 1 else SequentialLR(optimizer, schedulers, milestones)
