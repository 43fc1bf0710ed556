"""Where the tokens of right-padded rows stand in the model's input, and the way back.

Shapes: b rows of S columns; the model sees n sequences of T positions, of which a context-parallel rank holds a
contiguous slice of T / cp.

Two layouts. Plain: a row is a sequence. Packed: all rows of a micro-batch, each padded to a multiple of 128 (the widest
compressor window, so that no window holds tokens of two documents), stand one after the other in a single sequence.
AutoModel 0.7.0 keeps packed documents apart when it is told where they are: the attention mask is block-causal,
compressor windows and their overlap stop at documents, the indexer chooses among entries of its own document, and RoPE
follows `position_ids`, which start anew in each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.microbatch import round_up
from nemo_rl_dsv4.policy.parallel import Meshes, gather_along_dim

DOCUMENT_MULTIPLE = 128
"""Packed documents and context-parallel slices are multiples of this: no compressor window crosses either."""


@dataclass(frozen=True)
class TokenLayout:
    """The layout of one micro-batch on one rank.

    Attributes:
        rows: (b, S) of the padded rows.
        index_nT: int64, flat index into the rows of the token at each position; -1 where there is none.
        position_ids_nT: int64, position of a token in its row.
        documents_nT: int64, 1-based number of the row that a position belongs to, padding included; 0 behind the last.
            None in the plain layout.
        meshes: this rank's place in the context-parallel group.
    """

    rows: tuple[int, int]
    index_nT: torch.Tensor
    position_ids_nT: torch.Tensor
    documents_nT: torch.Tensor | None
    meshes: Meshes

    def _local(self, values_nT: torch.Tensor) -> torch.Tensor:
        length = values_nT.shape[1] // self.meshes.sizes.cp
        return values_nT.narrow(1, self.meshes.cp_rank * length, length)

    def place(self, values: torch.Tensor, fill: float | int = 0) -> torch.Tensor:
        """Bring values [b, S, ...] to this rank's positions [n, T / cp, ...]; positions without a token get `fill`."""
        index = self._local(self.index_nT)
        placed = values.flatten(0, 1)[index.clamp_min(0)]
        absent = (index < 0).view(*index.shape, *[1] * (values.ndim - 2))
        return placed.masked_fill(absent, fill)

    def restore(self, values_nT: torch.Tensor) -> torch.Tensor:
        """Bring this rank's values [n, T / cp] back to whole rows [b, S], 0 where a row has no token.

        Gathers over the context-parallel group; differentiable.
        """
        if self.meshes.cp_group is not None:
            values_nT = gather_along_dim(values_nT, 1, self.meshes.cp_group)
        b, S = self.rows
        present = self.index_nT >= 0
        out = values_nT.new_zeros(b * S).index_put((self.index_nT[present],), values_nT[present])
        return out.view(b, S)

    def model_inputs(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of the model's forward for ids [b, S]."""
        inputs: dict[str, Any] = {
            "input_ids": self.place(input_ids),
            "padding_mask": self._local(self.index_nT) < 0,
        }
        if self.meshes.cp_group is not None:
            inputs["_dsv4_cp_group"] = self.meshes.cp_group
        if self.documents_nT is None and self.meshes.cp_group is None:
            return inputs
        inputs["position_ids"] = self._local(self.position_ids_nT)
        if self.documents_nT is None:
            return inputs
        if self.meshes.cp_group is not None:
            inputs["packed_seq_ids"] = self._local(self.documents_nT)
        else:
            lengths = torch.bincount(self.documents_nT[0])[1:]
            inputs |= {"qkv_format": "thd", "seq_lens_padded": lengths.unsqueeze(0)}
        return inputs


def plain_layout(input_ids: torch.Tensor, lengths_b: torch.Tensor, meshes: Meshes) -> TokenLayout:
    """One sequence a row.

    Raises:
        UserError: S is not a multiple of 128 x cp under context parallelism.
    """
    b, S = input_ids.shape
    if S % (DOCUMENT_MULTIPLE * meshes.sizes.cp) and meshes.sizes.cp > 1:
        raise UserError(
            f"rows of {S} tokens cannot be cut over {meshes.sizes.cp} context-parallel ranks; wanted a multiple of "
            f"{DOCUMENT_MULTIPLE} x {meshes.sizes.cp}"
        )
    positions = torch.arange(S, device=input_ids.device).expand(b, -1)
    index = torch.arange(b * S, device=input_ids.device).view(b, S)
    index = index.masked_fill(positions >= lengths_b.unsqueeze(1), -1)
    return TokenLayout((b, S), index, positions, None, meshes)


def packed_layout(
    input_ids: torch.Tensor, lengths_b: torch.Tensor, meshes: Meshes, *, multiple: int = 1
) -> TokenLayout:
    """All rows in one sequence, each padded to a multiple of 128; the end to one of 128 x cp and of `multiple`."""
    b, S = input_ids.shape
    device = input_ids.device
    lengths = lengths_b.tolist()
    padded = [round_up(length, DOCUMENT_MULTIPLE) for length in lengths]
    total = round_up(sum(padded), math.lcm(DOCUMENT_MULTIPLE * meshes.sizes.cp, multiple))
    index = torch.full((1, total), -1, device=device)
    positions = torch.zeros((1, total), dtype=torch.long, device=device)
    documents = torch.zeros((1, total), dtype=torch.long, device=device)
    start = 0
    for row, (length, room) in enumerate(zip(lengths, padded, strict=True)):
        index[0, start : start + length] = torch.arange(row * S, row * S + length, device=device)
        positions[0, start : start + room] = torch.arange(room, device=device)
        documents[0, start : start + room] = row + 1
        start += room
    return TokenLayout((b, S), index, positions, documents, meshes)
