"""Routed experts of a layer, quantized straight into the memory that a bucket will send.

A stack is read once, in whatever order training keeps it, and its codes and scales are written once; any number of
experts costs two launches. See `refit.expert_layout` for where they lie. E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import Layout, Slot
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.model.stored_weight import require_finite
from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.refit.expert_layout import PARTS, ExpertLayout
from nemo_rl_dsv4.refit.expert_stack import ExpertStack, stack_of
from nemo_rl_dsv4.refit.placement import Placement


@dataclass(frozen=True)
class ExpertRun:
    """Consecutive routed experts of one layer that this process holds.

    Attributes:
        layout: of all experts of the layer.
        start: number of the first one here.
        gate_up: [E, 2I, H].
        down: [E, H, I].
    """

    layout: ExpertLayout
    start: int
    gate_up: ExpertStack
    down: ExpertStack

    @classmethod
    def of(
        cls,
        layout: ExpertLayout,
        stacks: Mapping[str, torch.Tensor],
        model: Layout,
        spec: QuantSpec,
        stored: Mapping[str, StoredCodes] | None = None,
        source_scales: Mapping[str, torch.Tensor] | None = None,
        start: int = 0,
    ) -> ExpertRun:
        """The run of two stacks that are here.

        Args:
            layout: see `layout_of`.
            stacks: the stacks, or this process's experts of them, by state-dict key.
            model: whose names and stacks they are.
            spec: how the profile quantizes expert weights.
            stored: codes of training; stacks by state-dict key.
            source_scales: by official weight name.
            start: see above.
        """
        made = []
        for parts in (("w1", "w3"), ("w2",)):
            key = model.slot(f"{layout.stem}.0.{parts[0]}.weight").key
            count, codes = len(stacks[key]), None if stored is None else stored.get(key)
            if codes is not None:
                data, scale = (model.view_experts(tensor, Slot(key, 0), count) for tensor in (codes.data, codes.scale))
                codes = StoredCodes(data, scale, codes.spec)
            numbers = range(start, start + count)
            names = [f"{layout.stem}.{expert}.{part}.weight" for expert in numbers for part in parts]
            values = model.view_experts(stacks[key].detach(), Slot(key, 0), count)
            made.append(stack_of(names, values, spec, codes, source_scales or {}))
        return cls(layout, start, *made)

    def __len__(self) -> int:
        return len(self.down.values)

    @property
    def device(self) -> torch.device:
        """Where the stacks are, and buffers must be."""
        return self.down.values.device

    def fits(self, capacity: int) -> bool:
        """Whether it can be written into buffers of so many bytes."""
        return self.layout.fitting(capacity) > 0

    def piece(self, first: int, room: int) -> int:
        """How many experts from `first` to write into `room` bytes; 0 where not one fits."""
        return min(self.layout.fitting(room), len(self) - first)

    def encode(
        self, first: int, count: int, buffer: torch.Tensor, offset: int, damaged: torch.Tensor
    ) -> list[Placement]:
        """Quantize `count` experts from `first` into a buffer and return where each official tensor lies, in order.

        Args:
            buffer: uint8, on the stacks' device.
            offset: first byte, a multiple of 16.
            damaged: int32 [1] on that device, set to 1 if an element is NaN or infinite.
        """
        targets = self.layout.stacks(count, buffer, offset)
        for stack, (codes, scale) in zip((self.gate_up, self.down), targets, strict=True):
            stack.write(first, count, codes, scale, damaged)
        return self.layout.place(self.start + first, count, offset)

    def require_finite(self, first: int, count: int) -> None:
        """Raise `UserError` with tensor and index of the first NaN or infinite element of some experts."""
        half = self.gate_up.values.shape[1] // 2
        for expert in range(first, first + count):
            stem = f"{self.layout.stem}.{self.start + expert}"
            require_finite(f"{stem}.w1.weight", self.gate_up.values[expert, :half])
            require_finite(f"{stem}.w3.weight", self.gate_up.values[expert, half:])
            require_finite(f"{stem}.w2.weight", self.down.values[expert])


def layout_of(stem: str, stacks: Mapping[str, torch.Tensor], model: Layout, spec: QuantSpec) -> ExpertLayout | None:
    """How two whole stacks (shapes are read only) lie in a bucket; None where experts must be encoded one by one.

    That is where blocks of the profile are not those of whole stacks, or codes are no bytes.
    """
    gate_up, _, down = (model.slot(f"{stem}.0.{part}.weight").key for part in PARTS)
    square = spec.fmt == "e4m3fn" and spec.scale == "ue8m0" and spec.block[0] == spec.block[1]
    if set(stacks) != {gate_up, down} or not square or len(stacks[gate_up]) != len(stacks[down]):
        return None
    shape = torch.empty(stacks[down].shape, device="meta")
    _, hidden, width = model.view_experts(shape, Slot(down, 0), len(shape)).shape
    both = torch.empty(stacks[gate_up].shape, device="meta")
    fused = model.view_experts(both, Slot(gate_up, 0), len(both)).shape[1:]
    whole = hidden % spec.block[0] == 0 and width % spec.block[0] == 0 and len(shape) > 0
    if not whole or fused != (2 * width, hidden) or stacks[gate_up].device != stacks[down].device:
        return None
    return ExpertLayout(stem, len(shape), hidden, width, spec.block[0])


def raise_first_damaged(runs: Sequence[tuple[ExpertRun, int, int]]) -> NoReturn:
    """Raise `UserError` for (run, first expert, number of experts), one of which noted a NaN or infinite element."""
    for run, first, count in runs:
        run.require_finite(first, count)
    stems = ", ".join(dict.fromkeys(run.layout.stem for run, _, _ in runs))
    raise UserError(
        f"{stems}: training stores a scale that is NaN or infinite for a finite weight; its codes are not those of the "
        "weights any more"
    )
