"""What the refit uses of vLLM's insides, by version, and a check that the installed one has it.

Read in the released sources of 0.25.0, 0.26.0, 0.29.0 and 0.33.0; measured on 0.26.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl_dsv4.errors import UserError

OLDEST, NEWEST = (0, 25), (0, 33)
_RELOAD = "vllm.model_executor.model_loader.reload"


@dataclass(frozen=True)
class Symbol:
    """A function or object of vLLM, its leading parameters, and the versions that have it."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    first: tuple[int, int] = OLDEST
    last: tuple[int, int] = NEWEST


SYMBOLS = (
    Symbol(f"{_RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Symbol(f"{_RELOAD}.layerwise", "finalize_layerwise_reload"),
    Symbol(f"{_RELOAD}.layerwise", "finalize_layerwise_processing", ("model", "model_config")),
    Symbol(f"{_RELOAD}.layerwise", "LAYERWISE_INFO"),
    Symbol(f"{_RELOAD}.meta", "SKIP_TENSORS"),
    Symbol("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Symbol("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
    Symbol("vllm.distributed.parallel_state", "get_tensor_model_parallel_world_size"),
    Symbol("vllm.distributed.parallel_state", "get_ep_group"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker"),
)
WORKER_METHODS = ("reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up")

BROADCAST = "hc_attn_fn_broadcast"
"""A tensor of the first layer that vLLM derives from hc_attn_fn in `finalize_mhc_broadcast_weights` (0.26 on): 0.26
puts a new tensor there, 0.29 on copies into the old one. Found at start, refreshed in place by us."""
SINKS = "attn_sink"
"""Written by a bare copy_ up to 0.32, so that layerwise reload never sees it; its own weight_loader from 0.33 on."""


def version_of(text: str) -> tuple[int, int]:
    """(major, minor) of a version string.

    Raises:
        UserError: no number where one is wanted, such as a build without a version.
    """
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        raise UserError(f"vLLM calls its version {text!r}; wanted a number such as 0.26.0") from None


def check_vllm(version: str, load: Callable[[str], Any] = importlib.import_module) -> None:
    """Compare the installed vLLM with the table.

    Args:
        version: `vllm.__version__`.
        load: imports a module by name.

    Raises:
        UserError: a version outside 0.25 to 0.33, or a symbol that has moved or changed its parameters.
    """
    number = version_of(version)
    if not OLDEST <= number <= NEWEST:
        raise UserError(f"vLLM is {version}; the refit knows 0.{OLDEST[1]} to 0.{NEWEST[1]}, install one of those")
    for symbol in SYMBOLS:
        if symbol.first <= number <= symbol.last:
            _check_symbol(symbol, version, load)
    worker = load("vllm.v1.worker.gpu_worker").Worker
    for method in WORKER_METHODS:
        if not callable(getattr(worker, method, None)):
            raise UserError(f"vLLM {version}: Worker.{method} is gone; the refit needs it, take another version")


def _check_symbol(symbol: Symbol, version: str, load: Callable[[str], Any]) -> None:
    where = f"vLLM {version}: {symbol.module}.{symbol.name}"
    try:
        found = getattr(load(symbol.module), symbol.name)
    except (ImportError, AttributeError):
        raise UserError(f"{where} is gone; the refit needs it, take a version it was read in (0.26.0)") from None
    if symbol.parameters:
        have = tuple(inspect.signature(found).parameters)[: len(symbol.parameters)]
        if have != symbol.parameters:
            raise UserError(f"{where} takes {have}; wanted {symbol.parameters}, take a version it was read in (0.26.0)")
