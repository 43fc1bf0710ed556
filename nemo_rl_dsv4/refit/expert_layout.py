"""Where the routed experts of a layer lie in a bucket that they are quantized into.

    [n, 2I, H] codes of w1 over w3 | [n, H, I] codes of w2 | float32 scales of w1 over w3 | float32 scales of w2

n experts, H hidden, I expert width.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.model.stored_weight import scale_name
from nemo_rl_dsv4.refit.placement import Placement, padded

PARTS = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ExpertLayout:
    """Shapes of one layer's experts.

    Attributes:
        stem: official name of the experts, such as `layers.3.ffn.experts`.
        experts: how many the layer has.
        hidden, width: whole blocks.
        block: rows and columns of a block.
    """

    stem: str
    experts: int
    hidden: int
    width: int
    block: int

    def sections(self, count: int) -> tuple[int, int, int, int]:
        """Bytes of the four sections of `count` experts, the last two padded."""
        weights = self.hidden * self.width
        scales = weights // self.block**2 * 4
        return 2 * count * weights, count * weights, padded(2 * count * scales), padded(count * scales)

    def fitting(self, room: int) -> int:
        """How many experts fit into `room` bytes."""
        count = min(self.experts, room // sum(self.sections(1)[:2]))
        while count and sum(self.sections(count)) > room:
            count -= 1
        return count

    def stacks(self, count: int, buffer: torch.Tensor, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of w1 over w3, and of w2: uint8 codes [count, rows, cols] and float32 scales.

        Args:
            count: experts.
            buffer: uint8.
            offset: first byte, a multiple of 16.
        """
        found, sizes = [], self.sections(count)
        for i, shape in enumerate(((count, 2 * self.width, self.hidden), (count, self.hidden, self.width))):
            grid = (count, shape[1] // self.block, shape[2] // self.block)
            at, scale_at = offset + sum(sizes[:i]), offset + sum(sizes[: 2 + i])
            codes = buffer[at : at + math.prod(shape)].view(shape)
            found.append((codes, buffer[scale_at : scale_at + 4 * math.prod(grid)].view(torch.float32).view(grid)))
        return found

    def place(self, first: int, count: int, offset: int) -> list[Placement]:
        """Where each official tensor of `count` experts from `first` lies, in export order."""
        sizes = self.sections(count)
        w13, w2, s13, s2 = (offset + sum(sizes[:i]) for i in range(4))
        rows, columns = self.width // self.block, self.hidden // self.block
        weights, scales = self.hidden * self.width, 4 * rows * columns
        dtype, wide, tall = torch.float8_e4m3fn, (self.width, self.hidden), (self.hidden, self.width)
        placed = []
        for i, names in enumerate(_names(self.stem, self.experts)[first : first + count]):
            one, three = w13 + 2 * i * weights, w13 + (2 * i + 1) * weights
            at, scale_at = w2 + i * weights, s2 + i * scales
            placed += (
                Placement(names[0], dtype, wide, one, weights),
                Placement(names[1], torch.float32, (rows, columns), s13 + 2 * i * scales, scales),
                Placement(names[2], dtype, wide, three, weights),
                Placement(names[3], torch.float32, (rows, columns), s13 + (2 * i + 1) * scales, scales),
                Placement(names[4], dtype, tall, at, weights),
                Placement(names[5], torch.float32, (columns, rows), scale_at, scales),
            )
        return placed


@functools.lru_cache(maxsize=256)
def _names(stem: str, experts: int) -> tuple[tuple[str, ...], ...]:
    """For each expert the six names of its tensors in export order. Kept: a layer has the same ones at every refit."""
    weights = [[f"{stem}.{expert}.{part}.weight" for part in PARTS] for expert in range(experts)]
    return tuple(tuple(name for weight in row for name in (weight, scale_name(weight))) for row in weights)
