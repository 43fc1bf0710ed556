"""The quantized weights of a training model under official names, for the refit to send as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."


class StoredCodes(NamedTuple):
    """FP8 codes [out, in] of one official tensor, its float32 scale grid, and the format; views of training's cache."""

    data: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec


def weight_roundings(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, WeightRounding]]:
    """Yield (state-dict key, module, parameter name, rounding) of every rounded parameter, in module order."""
    for module_name, module in model.named_modules():
        for name, rounding in getattr(module, "_weight_rounding", {}).items():
            yield f"{module_name}.{name}".replace(_CHECKPOINT_WRAPPER, ""), module, name, rounding


@torch.no_grad()
def refresh_quantized(model: nn.Module) -> None:
    """Quantize every rounded parameter that changed since it was last quantized.

    What is quantized here stays in the cache for the next forward pass, and the other way round: an optimizer step
    costs one quantization of each weight however many micro-batches and refits follow it. Collective under FSDP: one
    unit at a time is gathered, and none whose weights are in the cache.
    """
    units = _fsdp_units(model)
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()  # the first refit comes before the first forward pass
    gathered: FSDPModule | None = None
    for _, module, name, rounding in weight_roundings(model):
        unit = units.get(id(module))
        if gathered is not None and gathered is not unit:
            gathered.reshard()
            gathered = None
        if unit is not None:
            if rounding.stored is not None:
                continue
            if gathered is None:
                unit.unshard()
                gathered = unit
        parameter = module._parameters[name]
        assert parameter is not None
        rounding.quantized(parameter)
    if gathered is not None:
        gathered.reshard()


def stored_codes(model: nn.Module, layout: Layout = AUTOMODEL) -> dict[str, StoredCodes]:
    """Official name -> codes and scale of every quantized weight in this rank's cache.

    A rank holds all linear weights and its own experts. Nothing is copied. A stack of its experts is found under its
    state-dict key as well, in the parameter's own orientation.
    """
    found: dict[str, StoredCodes] = {}
    for key, _, _, rounding in weight_roundings(model):
        stored = rounding.stored
        if stored is None:
            continue
        experts = stored.data.shape[0] if stored.data.ndim == 3 else 0
        first = rounding.first_expert
        if experts:
            found[key] = StoredCodes(stored.data, stored.scale, stored.spec)
        for name in layout.official_names(key, first + experts):
            slot = layout.slot(name)
            if slot.expert is None:
                found[name] = StoredCodes(stored.data, stored.scale, stored.spec)
            elif slot.expert >= first:
                one = replace(slot, expert=slot.expert - first)
                data, scale = layout.view(stored.data, one), layout.view(stored.scale, one)
                found[name] = StoredCodes(data, scale, stored.spec)
    return found


def _fsdp_units(model: nn.Module) -> dict[int, FSDPModule]:
    """Module id -> the innermost FSDP unit that holds it."""
    units: dict[int, FSDPModule] = {}
    for unit in model.modules():  # outer units first, inner ones overwrite
        if isinstance(unit, FSDPModule):
            units.update((id(module), unit) for module in unit.modules())
    return units
