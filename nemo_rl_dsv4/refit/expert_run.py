"""Routed experts of a layer, quantized straight into the memory that a bucket will send.

    bucket   [n, 2I, H] codes of w1 over w3 | [n, H, I] codes of w2 | float32 scales of w1 over w3 | scales of w2

A stack is read once, in whatever order training keeps it, and its codes and scales are written once; n experts cost two
launches. E experts, H hidden, I expert width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import Layout, Slot
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.model.stored_weight import require_finite, scale_name
from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.refit.expert_stack import ExpertStack, stack_of
from nemo_rl_dsv4.refit.placement import Placement, padded

_PARTS = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ExpertRun:
    """All routed experts of one layer.

    Attributes:
        stem: official name of the experts, such as `layers.3.ffn.experts`.
        gate_up: [E, 2I, H].
        down: [E, H, I].
    """

    stem: str
    gate_up: ExpertStack
    down: ExpertStack

    @classmethod
    def of(
        cls,
        stem: str,
        stacks: Mapping[str, torch.Tensor],
        layout: Layout,
        spec: QuantSpec,
        stored: Mapping[str, StoredCodes] | None = None,
        source_scales: Mapping[str, torch.Tensor] | None = None,
    ) -> ExpertRun | None:
        """The run of two unsharded stacks by state-dict key, or None where its experts must be encoded one by one.

        Args:
            stem: see above.
            stacks: the layer's stacks.
            layout: whose names and stacks they are.
            spec: how the profile quantizes expert weights.
            stored: codes of training; whole stacks by state-dict key.
            source_scales: by official weight name.
        """
        keys = {part: layout.slot(f"{stem}.0.{part}.weight").key for part in _PARTS}
        if set(stacks) != set(keys.values()):
            return None
        made = []
        for parts in (("w1", "w3"), ("w2",)):
            key, count = keys[parts[0]], len(stacks[keys[parts[0]]])
            codes = None if stored is None else stored.get(key)
            if codes is not None:
                data, scale = (layout.view_experts(tensor, Slot(key, 0), count) for tensor in (codes.data, codes.scale))
                codes = StoredCodes(data, scale, codes.spec)
            names = [f"{stem}.{expert}.{part}.weight" for expert in range(count) for part in parts]
            values = layout.view_experts(stacks[key].detach(), Slot(key, 0), count)
            made.append(stack_of(names, values, spec, codes, source_scales or {}))
        gate_up, down = made
        if gate_up is None or down is None:
            return None
        run = cls(stem, gate_up, down)
        hidden, width = down.values.shape[1:]
        fits = gate_up.values.shape[1:] == (2 * width, hidden) and len(gate_up.values) == len(down.values)
        return run if fits and gate_up.values.device == run.device and len(run) else None

    def __len__(self) -> int:
        return len(self.down.values)

    @property
    def device(self) -> torch.device:
        return self.down.values.device

    def sections(self, count: int) -> tuple[int, int, int, int]:
        """Bytes of the four sections of `count` experts, the last two padded."""
        weights = self.down.values[0].numel()
        scales = self.down.grid[0] * self.down.grid[1] * 4
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
        hidden, width = self.down.values.shape[1:]
        tall_grid, sizes = self.down.grid, self.sections(count)
        w13, w2, s13, s2 = starts = [offset + sum(sizes[:i]) for i in range(4)]
        for stack, at, scale_at in zip((self.gate_up, self.down), starts[:2], starts[2:], strict=True):
            shape, grid = (count, *stack.values.shape[1:]), (count, *stack.grid)
            codes = buffer[at : at + math.prod(shape)].view(shape)
            scale = buffer[scale_at : scale_at + 4 * math.prod(grid)].view(torch.float32).view(grid)
            stack.write(first, count, codes, scale, damaged)
        weights, scales = hidden * width, tall_grid[0] * tall_grid[1] * 4
        dtype, wide, tall = torch.float8_e4m3fn, (width, hidden), (hidden, width)
        wide_grid = (tall_grid[1], tall_grid[0])
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
        half = self.gate_up.values.shape[1] // 2
        for expert in range(first, first + count):
            names = _names(self.stem, len(self))[expert]
            require_finite(names[0], self.gate_up.values[expert, :half])
            require_finite(names[2], self.gate_up.values[expert, half:])
            require_finite(names[4], self.down.values[expert])


def raise_first_damaged(runs: Sequence[tuple[ExpertRun, int, int]]) -> NoReturn:
    """Raise `UserError` for (run, first expert, number of experts), one of which noted a NaN or infinite element."""
    for run, first, count in runs:
        run.require_finite(first, count)
    stems = ", ".join(dict.fromkeys(run.stem for run, _, _ in runs))
    raise UserError(
        f"{stems}: training stores a scale that is NaN or infinite for a finite weight; its codes are not those of the "
        "weights any more"
    )


@functools.lru_cache(maxsize=256)
def _names(stem: str, experts: int) -> tuple[tuple[str, ...], ...]:
    """For each expert the six names of its tensors in export order. Kept: a layer has the same ones at every refit."""
    weights = [[f"{stem}.{expert}.{part}.weight" for part in _PARTS] for expert in range(experts)]
    return tuple(tuple(name for weight in row for name in (weight, scale_name(weight))) for row in weights)
