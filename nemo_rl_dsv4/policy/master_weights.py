"""Float32 master weights under a BF16 model: FSDP2's mixed precision for a model that one process holds whole.

The parameters are float32: checkpoints, optimizer, gradient accumulation and clipping see them. Each layer computes
with BF16 copies that live as long as its forward pass (and its recomputation under activation checkpointing);
gradients flow back through the cast and accumulate in float32. Sharded models leave the casting to FSDP, whose gathers
then move half the bytes, but for experts that only expert parallelism shards: no FSDP unit holds them. Parameters that
AutoModel itself keeps in float32 in a BF16 model stay so, here and in its FSDP units.

A weight that is quantized for the forward pass is not copied: its codes are made from its BF16 value directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4Block
from torch import nn

from nemo_rl_dsv4.model.quantized_weights import weight_roundings


def to_master_weights(model: nn.Module) -> dict[str, torch.dtype]:
    """Turn every floating-point parameter into float32, in place.

    Args:
        model: built in the compute dtype, not yet sharded; a meta model stays on the meta device.

    Returns:
        Parameter name -> dtype it had, in which the forward pass computes.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return dtypes


def quantize_in(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Make every rounded weight quantize its value in the compute dtype, whoever does the casting.

    Without it the bytes would depend on the layout: FSDP hands out BF16 copies, expert parallelism float32 masters.

    Args:
        dtypes: what `to_master_weights` returned.
    """
    for key, _, _, rounding in weight_roundings(model):
        rounding.compute_dtype = dtypes[key]


def compute_in(model: nn.Module, dtypes: Mapping[str, torch.dtype], *, experts_only: bool = False) -> None:
    """Let each layer compute with copies of its parameters in `dtypes`, where FSDP does not make them.

    Call it after rounding is installed and before activation checkpointing wraps the layers.

    Args:
        dtypes: what `to_master_weights` returned.
        experts_only: routed experts only, for a model whose other parameters FSDP shards.
    """
    rounded = {key for key, *_ in weight_roundings(model)}
    if experts_only:
        dtypes = {key: dtype for key, dtype in dtypes.items() if ".mlp.experts." in key}
    taken: set[str] = set()
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, DeepseekV4Block)]
    units += [(name, module) for name, module in model.named_modules() if module._parameters]
    for unit_name, unit in units:
        casts: list[tuple[Any, str, torch.dtype]] = []
        for module_name, module in unit.named_modules():
            path = ".".join(part for part in (unit_name, module_name) if part)
            for name, parameter in module._parameters.items():
                key = f"{path}.{name}" if path else name
                if parameter is None or key in taken or key in rounded or key not in dtypes:
                    continue
                taken.add(key)
                if dtypes[key] != torch.float32:
                    casts.append((module, name, dtypes[key]))
        if casts:
            unit.register_forward_pre_hook(_overlay(casts))
            unit.register_forward_hook(_remove(casts), always_call=True)


def cast_float32_units(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Bring what enters and leaves the layers of a sharded model to its compute dtype.

    AutoModel gives an FSDP unit that holds float32 only, as the token embedding's then does and the last collapse of
    streams always does, a float32 policy: activations behind the embedding, and the final norm and logits behind the
    collapse, would be float32. Call it after sharding, so that these hooks run behind FSDP's own casts.
    """
    compute_dtype = dtypes["model.embed_tokens.weight"]
    for unit in (model.model.embed_tokens, model.model.hc_head):
        unit.register_forward_hook(lambda _module, _args, out: out.to(compute_dtype))


def _overlay(casts: list[tuple[Any, str, torch.dtype]]) -> Any:
    def before(*_: Any) -> None:
        for module, name, compute_dtype in casts:
            module.__dict__[name] = module._parameters[name].to(compute_dtype)

    return before


def _remove(casts: list[tuple[Any, str, torch.dtype]]) -> Any:
    def after(*_: Any) -> None:
        for module, name, _dtype in casts:
            module.__dict__.pop(name, None)

    return after
