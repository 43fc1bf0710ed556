"""Weights that the trainer rounds as the rollout stores them: rounded once per update, gradients straight-through."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant


class _RoundedOnce(torch.autograd.Function):
    """Use an already rounded copy of a weight in the forward pass; hand the gradient to the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        del ctx, weight
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grads[0], None


class WeightRounding:
    """Rounds one parameter and keeps the result until the parameter changes.

    Args:
        spec: two-dimensional block format of the weight, applied to the last two dims.
        halves: number of equal parts along the last dim that are rounded separately (2 for a fused gate-and-up matrix,
            so that no block straddles the two; 1 otherwise).
    """

    def __init__(self, spec: QuantSpec, halves: int = 1) -> None:
        self.spec, self.halves = spec, halves
        self.invalidate()

    def invalidate(self) -> None:
        """Forget the rounded copy. Needed where a change of the parameter leaves no trace on the tensor (FSDP)."""
        self._key: tuple[int, int] | None = None
        self._rounded: torch.Tensor | None = None

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight (same shape, dtype and device), without autograd."""
        key = (weight.data_ptr(), weight._version)
        if self._key != key or self._rounded is None:
            with torch.no_grad():
                parts = weight.detach().chunk(self.halves, dim=-1)
                rounded = [fake_quant(part, self.spec) for part in parts]
                self._rounded = rounded[0] if self.halves == 1 else torch.cat(rounded, dim=-1)
            self._key = key
        return self._rounded

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight with a straight-through gradient; DTensor in, DTensor out.

        A sharded expert stack keeps whole experts on a rank (`Shard(0)`), so rounding the local part equals rounding
        the whole. Any other sharding would cut blocks and is refused.
        """
        if not isinstance(weight, DTensor):
            return _RoundedOnce.apply(weight, self.round(weight))
        cuts_matrices = any(placement.is_shard() and not placement.is_shard(0) for placement in weight.placements)
        if cuts_matrices or weight.ndim != 3:
            raise UserError(
                f"cannot round a weight with placements {weight.placements}: wanted whole matrices on every rank "
                "(expert stacks sharded over experts only)"
            )
        local = weight.to_local()
        return DTensor.from_local(
            _RoundedOnce.apply(local, self.round(local)), weight.device_mesh, weight.placements, run_check=False
        )
