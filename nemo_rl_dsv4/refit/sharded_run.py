"""Routed experts that ranks hold apart, brought to every rank as codes, in pieces of up to 128 MiB.

The rank that holds some experts quantizes them in two launches, into the memory that a bucket will send where it is the
sender; one broadcast of that memory takes them to the others. Pieces are the same on every rank, whatever it does with
them, since each is a collective call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.expert_layout import ExpertLayout
from nemo_rl_dsv4.refit.expert_run import ExpertRun
from nemo_rl_dsv4.refit.placement import Placement

PIECE_BYTES = 128 << 20
"""Codes of one broadcast at most, or one expert."""


@dataclass
class ShardedRun:
    """All routed experts of one layer, sharded over experts.

    Attributes:
        layout: of all of them.
        local: those of this rank, None if it has none.
        device: of the stacks, on every rank.
        group: process group over which they are sharded.
        rank: this process in that group.
        chunk: experts of each rank but perhaps the last ones.
        done: experts that have been sent.
        broken: a piece was damaged; every rank has raised.
    """

    layout: ExpertLayout
    local: ExpertRun | None
    device: torch.device
    group: dist.ProcessGroup
    rank: int
    chunk: int
    done: int = 0
    broken: bool = False

    def __len__(self) -> int:
        return self.layout.experts

    def fits(self, capacity: int) -> bool:
        """Whether every piece can be written into a buffer of so many bytes."""
        return sum(self.layout.sections(self._piece(0))) <= capacity

    def piece(self, first: int, room: int) -> int:
        """Experts of the piece that begins at `first`; 0 where it does not fit into `room` bytes."""
        count = self._piece(first)
        return count if sum(self.layout.sections(count)) <= room else 0

    def _piece(self, first: int) -> int:
        end = min((first // self.chunk + 1) * self.chunk, len(self))
        return min(max(1, self.layout.fitting(PIECE_BYTES)), end - first)

    def encode(
        self, first: int, count: int, buffer: torch.Tensor, offset: int, damaged: torch.Tensor
    ) -> list[Placement]:
        """Bring a piece into a buffer, on every rank; see `ExpertRun.encode`.

        Raises:
            UserError: an element is NaN or infinite; every rank names its block.
        """
        assert (first, count) == (self.done, self._piece(first))
        owner, index = divmod(first, self.chunk)
        if owner == self.rank:
            assert self.local is not None
            self.local.encode(index, count, buffer, offset, damaged)
        dist.broadcast(buffer[offset : offset + sum(self.layout.sections(count))], group=self.group, group_src=owner)
        self.done += count
        self._check(first, count, buffer, offset)
        return self.layout.place(first, count, offset)

    def take_part(self) -> None:
        """Broadcast what a consumer left over: other ranks wait for it."""
        damaged = torch.zeros(1, dtype=torch.int32, device=self.device)
        while self.done < len(self):
            count = self._piece(self.done)
            size = sum(self.layout.sections(count))
            self.encode(self.done, count, torch.empty(size, dtype=torch.uint8, device=self.device), 0, damaged)

    def _check(self, first: int, count: int, buffer: torch.Tensor, offset: int) -> None:
        scales = [scale for _, scale in self.layout.stacks(count, buffer, offset)]
        if bool(torch.stack([scale.isfinite().all() for scale in scales]).all()):
            return
        self.broken = True
        for parts, scale in zip((("w1", "w3"), ("w2",)), scales, strict=True):
            bad = (~scale.isfinite()).nonzero()
            if len(bad):
                expert, row, column = bad[0].tolist()
                part, row = divmod(row, scale.shape[1] // len(parts))
                raise UserError(
                    f"{self.layout.stem}.{first + expert}.{parts[part]}.weight: block [{row}, {column}] holds a NaN or "
                    "infinite value; find what produced it"
                )
