"""Routed experts of a layer, quantized straight into the memory that a bucket will send.

    bucket   [n, 2I, H] codes of w1 over w3 | [n, H, I] codes of w2 | float32 scales of w1 over w3 | scales of w2

A stack is read once, in whatever order training keeps it, and its codes and scales are written once; n experts cost two
launches. E experts, H hidden, I expert width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.model.checkpoint_format import Layout, Slot
from nemo_rl_dsv4.model.stored_weight import require_finite, scale_name
from nemo_rl_dsv4.numerics import QuantSpec, quantize
from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.refit.placement import Placement, padded

_PARTS = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ExpertRun:
    """All routed experts of one layer.

    Attributes:
        stem: official name of the experts, such as `layers.3.ffn.experts`.
        gate_up: [E, 2I, H], any strides.
        down: [E, H, I], any strides.
        spec: FP8 in square blocks that divide H and I.
    """

    stem: str
    gate_up: torch.Tensor
    down: torch.Tensor
    spec: QuantSpec

    @classmethod
    def of(cls, stem: str, stacks: dict[str, torch.Tensor], layout: Layout, spec: QuantSpec) -> ExpertRun | None:
        """The run of two unsharded stacks by state-dict key, or None where its blocks are not those of whole stacks."""
        by_part = {layout.slot(f"{stem}.0.{part}.weight").key: part for part in _PARTS}
        if set(stacks) != set(by_part) or spec.fmt == "e2m1" or spec.block[0] != spec.block[1]:
            return None
        whole = {
            by_part[key]: layout.view_experts(stack.detach(), Slot(key, 0), len(stack)) for key, stack in stacks.items()
        }
        run = cls(stem, whole["w3"], whole["w2"], spec)
        hidden, width, block = run.down.shape[1], run.down.shape[2], spec.block[0]
        fits = hidden % block == 0 and width % block == 0 and run.gate_up.shape[1:] == (2 * width, hidden)
        return run if fits and run.gate_up.device == run.down.device and len(run) else None

    def __len__(self) -> int:
        return len(self.down)

    @property
    def device(self) -> torch.device:
        return self.down.device

    def sections(self, count: int) -> tuple[int, int, int, int]:
        """Bytes of the four sections of `count` experts, the last two padded."""
        weights = self.down.shape[1] * self.down.shape[2]
        scales = weights // self.spec.block[0] ** 2 * 4
        return 2 * count * weights, count * weights, padded(2 * count * scales), padded(count * scales)

    def fitting(self, room: int) -> int:
        """How many experts fit into `room` bytes."""
        count = min(len(self), room // sum(self.sections(1)[:2]))
        while count and sum(self.sections(count)) > room:
            count -= 1
        return count

    def encode(
        self, first: int, count: int, buffer: torch.Tensor, offset: int, damaged: torch.Tensor
    ) -> list[Placement]:
        """Quantize `count` experts from `first` into a buffer and return where each official tensor lies, in order.

        Args:
            buffer: uint8, on the stacks' device.
            offset: first byte, a multiple of 16.
            damaged: int32 [1] on that device, set to 1 if an element is NaN or infinite.
        """
        hidden, width = self.down.shape[1:]
        block, sizes = self.spec.block[0], self.sections(count)
        w13, w2, s13, s2 = starts = [offset + sum(sizes[:i]) for i in range(4)]
        shapes = ((2 * width, hidden), (hidden, width))
        for stack, at, scale_at, (rows, columns) in zip(
            (self.gate_up, self.down), starts[:2], starts[2:], shapes, strict=True
        ):
            grid = (count, rows // block, columns // block)
            codes = buffer[at : at + count * rows * columns].view(count, rows, columns)
            scale = buffer[scale_at : scale_at + 4 * grid[0] * grid[1] * grid[2]].view(torch.float32).view(grid)
            _quantize(stack[first : first + count], self.spec, codes, scale, damaged)
        dtype, weights = format_of(self.spec.fmt).dtype, hidden * width
        assert dtype is not None
        scales = weights // block**2 * 4
        wide, tall = (width, hidden), (hidden, width)
        wide_grid, tall_grid = (width // block, hidden // block), (hidden // block, width // block)
        placed = []
        for i, names in enumerate(_names(self.stem, len(self))[first : first + count]):
            one, three = w13 + 2 * i * weights, w13 + (2 * i + 1) * weights
            at, scale_at = w2 + i * weights, s2 + i * scales
            placed += (
                Placement(names[0], dtype, wide, one, weights),
                Placement(names[1], torch.float32, wide_grid, s13 + 2 * i * scales, scales),
                Placement(names[2], dtype, wide, three, weights),
                Placement(names[3], torch.float32, wide_grid, s13 + (2 * i + 1) * scales, scales),
                Placement(names[4], dtype, tall, at, weights),
                Placement(names[5], torch.float32, tall_grid, scale_at, scales),
            )
        return placed

    def require_finite(self, first: int, count: int) -> None:
        """Raise `UserError` with tensor and index of the first NaN or infinite element of some experts."""
        half = self.gate_up.shape[1] // 2
        for expert in range(first, first + count):
            names = _names(self.stem, len(self))[expert]
            require_finite(names[0], self.gate_up[expert, :half])
            require_finite(names[2], self.gate_up[expert, half:])
            require_finite(names[4], self.down[expert])


def _quantize(
    values: torch.Tensor, spec: QuantSpec, codes: torch.Tensor, scale: torch.Tensor, damaged: torch.Tensor
) -> None:
    if values.is_cuda:
        from nemo_rl_dsv4.numerics.fused import stacks

        if stacks.covers(values, spec):
            return stacks.quantize_stack(values, spec, codes, scale, damaged)
    # Square blocks are the same blocks either way round: read a transposed stack in its own order.
    turned = values.stride(-1) != 1 and values.stride(-2) == 1
    quantized = quantize(values.transpose(-1, -2) if turned else values, spec)
    data, grid = quantized.data.view(torch.uint8), quantized.scale
    codes.copy_(data.transpose(-1, -2) if turned else data)
    scale.copy_(grid.transpose(-1, -2) if turned else grid)
    damaged.logical_or_(~scale.isfinite().all())
    return None


@functools.lru_cache(maxsize=256)
def _names(stem: str, experts: int) -> tuple[tuple[str, ...], ...]:
    """For each expert the six names of its tensors in export order. Kept: a layer has the same ones at every refit."""
    weights = [[f"{stem}.{expert}.{part}.weight" for part in _PARTS] for expert in range(experts)]
    return tuple(tuple(name for weight in row for name in (weight, scale_name(weight))) for row in weights)
