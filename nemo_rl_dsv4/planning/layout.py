"""Where every parameter of the real, parallelized AutoModel model lies, read off the model built on the meta device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.planning.fake_world import fake_world
from nemo_rl_dsv4.policy.parallel import ParallelSizes, create_meshes, parallelize

CLASSES = (
    ("experts", (".mlp.experts.",)),
    ("shared experts", (".shared_experts.",)),
    ("router", (".mlp.gate.",)),
    ("indexer", (".indexer.",)),
    ("compressor", (".compressor.",)),
    ("attention", (".self_attn.",)),
    ("hyper-connections", (".attn_hc.", ".ffn_hc.", ".hc_head.")),
    ("embedding", ("embed_tokens",)),
    ("head", ("lm_head",)),
    ("norms", ("norm.", "layernorm.")),
)
"""Tensor class -> parts of a parameter's name; the first that fits counts."""


def tensor_class(name: str) -> str:
    """Class of a parameter by its AutoModel name."""
    return next(kind for kind, marks in CLASSES if any(mark in f".{name}" for mark in marks))


@dataclass(frozen=True)
class Placement:
    """One parameter on one rank. Shapes are whole and local; `sharding` says over which axes and dims it is cut."""

    name: str
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    sharding: str

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Elements on this rank."""
        return math.prod(self.local_shape)

    @property
    def local_bytes(self) -> int:
        """Bytes on this rank in the master dtype."""
        return self.local_numel * self.dtype.itemsize


@dataclass(frozen=True)
class GatheredUnit:
    """Parameters that FSDP gathers together: bytes whole in the compute dtype, and elements that get a gradient."""

    name: str
    ranks: int
    gathered_bytes: int
    trainable_numel: int
    stays_gathered: bool


@dataclass(frozen=True)
class Layout:
    """Parameters, FSDP units and buffers of one rank."""

    rank: int
    placements: tuple[Placement, ...]
    units: tuple[GatheredUnit, ...]
    buffer_bytes: int

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(placement.numel for placement in self.placements)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole parameters that are on this rank at once in a forward and backward pass, shards not counted.

        Units that stay gathered add up; of the others the largest and the one fetched ahead of it count.
        """
        stay = sum(unit.gathered_bytes for unit in self.units if unit.stays_gathered)
        passing = sorted((unit.gathered_bytes for unit in self.units if not unit.stays_gathered), reverse=True)
        return stay + sum(passing[:2])

    def active_parameters(self, experts_per_token: int) -> int:
        """Elements that one token uses: all but the embedding's other rows and the experts it does not visit."""
        total = 0
        for placement in self.placements:
            if placement.kind == "experts":
                total += placement.numel // placement.shape[0] * experts_per_token
            elif placement.kind != "embedding":
                total += placement.numel
        return total


def plain_name(name: str) -> str:
    """AutoModel's name without the wrapper that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def lay_out(
    hf_config: Mapping[str, Any],
    sizes: ParallelSizes,
    *,
    rank: int = 0,
    compute_dtype: torch.dtype = torch.bfloat16,
    activation_checkpointing: bool = False,
) -> Layout:
    """Build the model on the meta device, parallelize it with the worker's own function, and read off where it lies.

    Args:
        hf_config: official-style configuration.
        sizes: ranks on each axis.
        rank: the rank to look at; the first one never holds less than another.
        compute_dtype: dtype of gathered parameters; master parameters are float32.
        activation_checkpointing: as in the recipe; it changes names and units only.

    Raises:
        UserError: the configuration is no DeepSeek-V4, or the sizes do not fit it.
    """
    with fake_world(sizes.world, rank):
        model = build_model(automodel_config(hf_config), routing_weight_after_down=True, device=torch.device("meta"))
        meshes = create_meshes(sizes)
        parallelize(model, meshes, activation_checkpointing=activation_checkpointing, compute_dtype=compute_dtype)
        placements = tuple(_placement(name, parameter) for name, parameter in model.named_parameters())
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        return Layout(rank, placements, tuple(_units(model)), buffers)


def _placement(name: str, parameter: torch.Tensor) -> Placement:
    name = plain_name(name)
    if isinstance(parameter, DTensor):
        local = tuple(parameter.to_local().shape)
        axes = parameter.device_mesh.mesh_dim_names or ()
        cuts = [
            f"{getattr(axis, 'value', axis)}: dim {placement.dim} of {size}"  # type: ignore[attr-defined]
            for axis, placement, size in zip(axes, parameter.placements, parameter.device_mesh.shape, strict=True)
            if placement.is_shard()
        ]
        sharding = ", ".join(cuts) or "whole on every rank"
    else:
        local, sharding = tuple(parameter.shape), "whole on every rank"
    return Placement(
        name, tensor_class(name), tuple(parameter.shape), local, parameter.dtype, parameter.requires_grad, sharding
    )


def _units(model: torch.nn.Module) -> list[GatheredUnit]:
    """One entry per FSDP unit that has parameters, read from FSDP2's own state."""
    from torch.distributed.fsdp import FSDPModule

    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        sizes = [(math.prod(param._orig_size), param) for param in group.fsdp_params]
        dtype = group.mp_policy.param_dtype
        units.append(
            GatheredUnit(
                name=plain_name(name) or "the rest",
                ranks=group.mesh_info.mesh.size(),
                gathered_bytes=sum(numel * (dtype or param.orig_dtype).itemsize for numel, param in sizes),
                trainable_numel=sum(numel for numel, param in sizes if param.sharded_param.requires_grad),
                stays_gathered=group.post_forward_mesh_info is None,
            )
        )
    return units
