"""Trainer and engine on the same GPUs: who gives memory back when, and what must not be forgotten.

The order around a refit: the trainer offloads and drops its workspaces; the engine wakes its weights alone, is
refitted, and only then gets its KV cache back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

_Result = TypeVar("_Result")
_WORKSPACES = "_fp8_workspaces"


class SleepingEngine(Protocol):
    """vLLM's `LLM`, as far as needed here."""

    def sleep(self, level: int) -> Any: ...

    def wake_up(self, tags: list[str]) -> Any: ...

    def reset_prefix_cache(self) -> Any: ...


def release_workspaces(model: torch.nn.Module) -> int:
    """Drop FP8 weight workspaces that modules keep beside their parameters, and return the bytes they held.

    TransformerEngine's modules cache quantized weights in `_fp8_workspaces`. Moving parameters to the host leaves them
    on the GPU, as much as the model's FP8 weights.
    """
    freed = 0
    for module in model.modules():
        workspaces = getattr(module, _WORKSPACES, None)
        if isinstance(workspaces, dict):
            freed += sum(_bytes(value) for value in workspaces.values())
            workspaces.clear()
    return freed


def refit_asleep(engine: SleepingEngine, refit: Callable[[], _Result]) -> _Result:
    """Wake an engine that sleeps at level 2 for a refit, and its KV cache only after it.

    Args:
        engine: asleep.
        refit: loads the weights; the engine's own are gone after a level-2 sleep, so it must load all of them.

    Returns:
        What `refit` returned.

    Raises:
        Exception: what `refit` raised; the engine is then put to sleep again, as it has no whole weights.
    """
    engine.wake_up(tags=["weights"])
    try:
        result = refit()
    except BaseException:
        engine.sleep(level=2)
        raise
    engine.wake_up(tags=["kv_cache"])
    engine.reset_prefix_cache()
    return result


def _bytes(value: Any) -> int:
    """Bytes of a workspace: a tensor, or an object that holds tensors in its attributes."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(inner) for inner in vars(value).values() if isinstance(inner, torch.Tensor))
