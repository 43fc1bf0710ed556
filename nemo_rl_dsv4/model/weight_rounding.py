"""Weights as the rollout stores them: quantized once an update, the same bytes for every forward pass and the refit.

A `WeightRounding` owns the codes and scales of one parameter and, if asked, the rounded values in the training dtype.
What is quantized is the weight in the dtype the forward pass computes in (under FSDP the all-gathered copy), so that
every parallel layout finds the same bytes. It always sees whole matrices: FSDP gathers before the forward pass, so a
block that a shard boundary cuts is whole again, and expert stacks are sharded over experts only.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, quantize


def checkpoint_spec(spec: QuantSpec, profile: str = "") -> QuantSpec:
    """Replace e4m3fnuz by the e4m3fn a checkpoint holds: codes read as fnuz are half, so max 224 gives equal values.

    Raises:
        UserError: fnuz codes with another largest value, which have no twin.
    """
    if spec.fmt != "e4m3fnuz":
        return spec
    if spec.fnuz_max != 224.0:
        raise UserError(f"profile {profile}: weights with fnuz_max {spec.fnuz_max:g} have no e4m3fn twin; wanted 224")
    return replace(spec, fmt="e4m3fn")


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes and scales of one parameter, in the parameter's own layout.

    Attributes:
        data: FP8 codes, the parameter's shape [..., rows, cols].
        scale: float32, one value a block. With two halves the grids of the left and right half of the columns stand
            side by side, so that `Layout.view` cuts codes and scales alike.
        spec: the block format, of either orientation of a stack (square blocks).
        halves: equal parts along the last dim that were quantized apart.
    """

    data: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec
    halves: int = 1

    def of_expert(self, expert: int) -> QuantizedWeight:
        """One matrix of a stack, sharing memory."""
        return QuantizedWeight(self.data[expert], self.scale[expert], self.spec, self.halves)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The rounded weight in `dtype`, in the parameter's shape; strides follow the codes."""
        if self.halves == 1 or self.data.shape[-1] // self.halves % self.spec.block[1] == 0:
            return _dequantized(self.data, self.scale, self.spec, dtype)
        parts = zip(self.data.chunk(self.halves, -1), self.scale.chunk(self.halves, -1), strict=True)
        return torch.cat([_dequantized(data, scale, self.spec, dtype) for data, scale in parts], dim=-1)


def _dequantized(data: torch.Tensor, scale: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    if data.stride(-1) != 1 and data.stride(-2) == 1:  # stored transposed: no copy of the codes
        return _dequantized(data.transpose(-1, -2), scale.transpose(-1, -2), spec, dtype).transpose(-1, -2)
    return dequantize(Quantized(data, scale.contiguous(), spec, data.shape), dtype)


class _RoundedOnce(torch.autograd.Function):
    """Use an already rounded copy of a weight in the forward pass; hand the gradient to the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


class WeightRounding:
    """Quantizes one parameter and keeps the result until the parameter changes.

    Args:
        spec: two-dimensional block format of the weight, applied to the last two dims.
        halves: number of equal parts along the last dim that are quantized separately (2 for a fused gate-and-up
            matrix, so that no block straddles the two; 1 otherwise).
        keep_values: keep the rounded values beside the codes. Costs the training dtype's bytes a weight and saves one
            dequantization each forward pass.
        transposed: lay a stack's codes out as [..., cols, rows], the order of the official tensors and of FP8 GEMMs.

    Attributes:
        compute_dtype: dtype in which the forward pass computes and whose values are quantized; None for the weight's.
    """

    def __init__(self, spec: QuantSpec, halves: int = 1, *, keep_values: bool = True, transposed: bool = False) -> None:
        self.spec, self.halves = checkpoint_spec(spec), halves
        self.keep_values, self.transposed = keep_values, transposed
        self.compute_dtype: torch.dtype | None = None
        self.invalidate()

    def invalidate(self) -> None:
        """Forget codes and values. Needed where a change of the parameter leaves no trace on the tensor (FSDP)."""
        self._owner: weakref.ref | None = None
        self._version = -1
        self._sharding: DeviceMesh | None = None
        self._stored: QuantizedWeight | None = None
        self._values: torch.Tensor | None = None

    @property
    def stored(self) -> QuantizedWeight | None:
        """The codes in the cache: of this rank's experts for a sharded stack, else whole; None if it is empty."""
        return self._stored

    def tensors(self) -> list[torch.Tensor]:
        """What the cache holds."""
        codes = [] if self._stored is None else [self._stored.data, self._stored.scale]
        return codes if self._values is None else [*codes, self._values]

    @property
    def first_expert(self) -> int:
        """Number, in the whole stack, of this rank's first expert."""
        if self._sharding is None or self._stored is None:
            return 0
        return self._sharding.get_local_rank() * self._stored.data.shape[0]

    def quantized(self, weight: torch.Tensor) -> QuantizedWeight:
        """Return codes and scales of `weight` (a DTensor: of this rank's experts), quantizing only what changed.

        FSDP hands out one and the same tensor object at every gather and hides its writes from the version counter, so
        micro-batches of a step find the cache full; `invalidate` must follow each update.
        """
        local = _whole_matrices(weight)
        owner = self._owner() if self._owner is not None else None
        if self._stored is None or owner is not weight or self._version != local._version:
            self._stored = self._quantize(local)
            self._values = None
            self._owner, self._version = weakref.ref(weight), local._version
            self._sharding = weight.device_mesh if isinstance(weight, DTensor) else None
        return self._stored

    @torch.no_grad()
    def _quantize(self, local: torch.Tensor) -> QuantizedWeight:
        weight = local.detach().to(self.compute_dtype or local.dtype)
        if self.transposed:
            weight = weight.transpose(-1, -2)
        dim = -2 if self.transposed else -1
        together = self.halves == 1 or weight.shape[dim] // self.halves % self.spec.block[dim] == 0
        parts = [quantize(part, self.spec) for part in ([weight] if together else weight.chunk(self.halves, dim))]
        data, scale = parts[0].data, parts[0].scale
        if len(parts) > 1:
            data = torch.cat([part.data.view(torch.uint8) for part in parts], dim).view(data.dtype)
            scale = torch.cat([part.scale for part in parts], dim)
        if self.transposed:
            data, scale = data.transpose(-1, -2), scale.transpose(-1, -2)
        return QuantizedWeight(data, scale, self.spec, self.halves)

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight (this rank's part of it) in the compute dtype, without autograd."""
        stored = self.quantized(weight)
        if self._values is not None:
            return self._values
        values = stored.values(self.compute_dtype or weight.dtype)
        if self.keep_values:
            self._values = values
        return values

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight with a straight-through gradient; DTensor in, DTensor out."""
        rounded = self.round(weight)
        if not isinstance(weight, DTensor):
            return _RoundedOnce.apply(weight, rounded)
        local = _RoundedOnce.apply(weight.to_local(), rounded)
        return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)


def _whole_matrices(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight: the tensor itself, or whole experts of a stack sharded over experts.

    Raises:
        UserError: a sharding that cuts matrices, whose blocks no rank could quantize alone.
    """
    if not isinstance(weight, DTensor):
        return weight
    cuts_matrices = any(placement.is_shard() and not placement.is_shard(0) for placement in weight.placements)
    if cuts_matrices or weight.ndim != 3:
        raise UserError(
            f"cannot round a weight with placements {weight.placements}: wanted whole matrices on every rank "
            "(expert stacks sharded over experts only)"
        )
    return weight._local_tensor
