"""Where AutoModel 0.7.0 and transformers 5.18 keep the tensors that a DeepSeek-V4 checkpoint names.

Routed experts are one official tensor each, and slices of a stack in both models:

    official      layers.N.ffn.experts.E.w1 [I, H]   w3 [I, H]   w2 [H, I]
    AutoModel     gate_and_up_projs [E, H, 2I] (gate columns, then up)      down_projs [E, I, H]
    transformers  gate_up_proj      [E, 2I, H] (gate rows, then up)         down_proj  [E, H, I]

E experts, H hidden, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.model.hf_config import automodel_config, transformers_config
from nemo_rl_dsv4.model.official_names import (
    EXPERT_PARTS,
    LAYER_INDEX,
    LAYER_ROWS,
    MODEL_INDEX,
    MODEL_ROWS,
    OFFICIAL_EXPERT,
    OFFICIAL_LAYER,
    Part,
    expected_tensors,
    export_order,
    fused_group,
    tensor_kind,
    unknown_name,
)

__all__ = [
    "AUTOMODEL",
    "TRANSFORMERS",
    "Layout",
    "Slot",
    "automodel_config",
    "expected_tensors",
    "export_order",
    "fused_group",
    "tensor_kind",
    "transformers_config",
]

_MODEL_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Slot:
    """Where an official tensor lives in a model: a state-dict key, and for routed experts which slice of the stack."""

    key: str
    expert: int | None = None
    part: Part | None = None


@dataclass(frozen=True)
class Region:
    """The part of an official tensor that a rank holds.

    Attributes:
        target: view of the rank's memory, in official orientation; writes go through.
        rows: rows of the official tensor, [first, last).
        cols: its columns; a vector has none, (0, 0).
    """

    target: torch.Tensor
    rows: tuple[int, int]
    cols: tuple[int, int]


class Layout:
    """Names and expert stacking of one model implementation."""

    def __init__(self, title: str, names: Mapping[str, str], stacks: Mapping[str, str], *, transposed: bool) -> None:
        """`names`: official name without its layer -> model name; `stacks`: gate_up and down stack names."""
        self.title = title
        self._names = dict(names)
        self._official = {model: official for official, model in names.items()}
        self._gate_up, self._down = stacks["gate_up"], stacks["down"]
        self._transposed = transposed

    def slot(self, official_name: str) -> Slot:
        """Find the model's tensor for an official name; `UserError` if the name is not an official one."""
        layer = OFFICIAL_LAYER.fullmatch(official_name)
        if layer is None:
            if official_name in MODEL_INDEX:
                return Slot(self._names[official_name])
            raise unknown_name(official_name, "an official")
        prefix = f"model.layers.{layer[1]}."
        if layer[2] in LAYER_INDEX:
            return Slot(prefix + self._names[layer[2]])
        expert = OFFICIAL_EXPERT.fullmatch(layer[2])
        if expert is None:
            raise unknown_name(official_name, "an official")
        part = EXPERT_PARTS[expert[2]]
        return Slot(prefix + (self._down if part == "down" else self._gate_up), int(expert[1]), part)

    def official_names(self, key: str, num_experts: int) -> list[str]:
        """Return the official tensors held by one state-dict key, in export order: one, or w1/w3 or w2 of each expert.

        Raises:
            UserError: the key is not one of this model.
        """
        layer = _MODEL_LAYER.fullmatch(key)
        if layer is None:
            official = self._official.get(key)
            if official in MODEL_INDEX:
                return [official]
            raise unknown_name(key, f"a {self.title}")
        stem = f"layers.{layer[1]}."
        if layer[2] in (self._gate_up, self._down):
            parts = ("w1", "w3") if layer[2] == self._gate_up else ("w2",)
            return [f"{stem}ffn.experts.{e}.{w}.weight" for e in range(num_experts) for w in parts]
        official = self._official.get(layer[2])
        if official not in LAYER_INDEX:
            raise unknown_name(key, f"a {self.title}")
        return [stem + official]

    def view(self, tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
        """View the part of a model tensor that a slot names, in official orientation [out, in]; writes go through."""
        if slot.expert is None:
            return tensor
        stacked = tensor[slot.expert]
        if self._transposed:
            stacked = stacked.transpose(0, 1)
        if slot.part == "down":
            return stacked
        half = stacked.shape[0] // 2
        return stacked[:half] if slot.part == "gate" else stacked[half:]

    def view_experts(self, stack: torch.Tensor, first: Slot, count: int) -> torch.Tensor:
        """View the part that slot `first` names of `count` consecutive experts: [count, out, in]."""
        assert first.expert is not None
        experts = stack[first.expert : first.expert + count]
        if self._transposed:
            experts = experts.transpose(1, 2)
        half = experts.shape[1] // 2
        return {"down": experts, "gate": experts[:, :half], "up": experts[:, half:], None: experts}[first.part]

    def official_dim(self, stack_dim: int) -> int:
        """Dim of the official tensor [out, in] that dim 1 or 2 of an expert stack becomes."""
        return 2 - stack_dim if self._transposed else stack_dim - 1

    def stack_shape(self, official_shape: Sequence[int], slot: Slot, num_experts: int) -> tuple[int, int, int]:
        """Shape of the whole stack that holds an expert tensor of `official_shape` [out, in] at this slot."""
        rows, cols = official_shape
        rows = rows if slot.part == "down" else 2 * rows
        return (num_experts, cols, rows) if self._transposed else (num_experts, rows, cols)

    def region(
        self, local: torch.Tensor, offsets: Sequence[int], slot: Slot, official_shape: Sequence[int]
    ) -> Region | None:
        """Find which part of an official tensor a rank's part of a model tensor holds.

        Args:
            local: the rank's part of the model tensor at `slot.key`.
            offsets: where it begins in the whole model tensor, one a dim.
            slot: the official tensor's place.
            official_shape: its shape.

        Returns:
            The part and a view of it, or None where the rank holds nothing of it.
        """
        if slot.expert is None:
            if local.dim() == 0:
                return Region(local, (0, 1), (0, 0))
            cols = (offsets[1], offsets[1] + local.shape[1]) if local.dim() > 1 else (0, 0)
            whole = Region(local, (offsets[0], offsets[0] + local.shape[0]), cols)
            return whole if local.numel() else None
        if not offsets[0] <= slot.expert < offsets[0] + local.shape[0]:
            return None
        matrix, (row, col) = local[slot.expert - offsets[0]], offsets[1:]
        if self._transposed:
            matrix, row, col = matrix.transpose(0, 1), col, row
        start = official_shape[0] if slot.part == "up" else 0
        first, last = max(row, start), min(row + matrix.shape[0], start + official_shape[0])
        if first >= last or not matrix.shape[1]:
            return None
        return Region(matrix[first - row : last - row], (first - start, last - start), (col, col + matrix.shape[1]))

    def split(self, state_dict: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Slot]]:
        """Yield (official name, slot) for every tensor of a state dict in export order, reading shapes only.

        Raises:
            UserError: a key that is not one of this model.
        """
        yield from self.split_keys((key, len(t) if t.dim() == 3 else 0) for key, t in state_dict.items())

    def split_keys(self, sizes: Iterable[tuple[str, int]]) -> list[tuple[str, Slot]]:
        """`split` of (state-dict key, number of experts in its stack)."""
        slots = [(name, self.slot(name)) for key, experts in sizes for name in self.official_names(key, experts)]
        return sorted(slots, key=lambda item: export_order(item[0]))


_ALL_ROWS = (*MODEL_ROWS, *LAYER_ROWS)
AUTOMODEL = Layout(
    "AutoModel",
    {row.official: row.automodel for row in _ALL_ROWS},
    {"gate_up": "mlp.experts.gate_and_up_projs", "down": "mlp.experts.down_projs"},
    transposed=True,
)
TRANSFORMERS = Layout(
    "transformers",
    {row.official: row.transformers for row in _ALL_ROWS},
    {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"},
    transposed=False,
)
