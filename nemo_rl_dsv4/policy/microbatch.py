"""Cut a batch into micro-batches of similar length.

Shapes: B sequences, S tokens. Rows are right-padded, so cutting trailing columns that are padding for every row of a
micro-batch changes no result; sorting rows by length and starting a new micro-batch where the length jumps makes the
cut large. Losses are sums with global normalisers, so how rows are grouped changes no result either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.routes import MISSING_EXPERT, ROUTED_EXPERTS

LENGTH_JUMP = 1.5
"""Rows longer than this times the shortest of a micro-batch start a new one."""


@dataclass(frozen=True)
class MicroBatch:
    """`rows`: int64 indices into the batch; `data`: those rows of every tensor, cut to `length` columns."""

    rows: torch.Tensor
    length: int
    data: dict[str, torch.Tensor]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def length_groups(lengths_B: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Row indices in groups of at most `size`, shortest first, none mixing lengths beyond `LENGTH_JUMP`."""
    order = torch.argsort(lengths_B, stable=True).tolist()
    groups: list[list[int]] = []
    for row in order:
        if not groups or len(groups[-1]) == size or lengths_B[row] > LENGTH_JUMP * lengths_B[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return [torch.tensor(group, dtype=torch.long) for group in groups]


def split_into(groups: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Halve the largest groups until there are `count`.

    Ranks that share collectives have to run the same number of forward passes; a rank with fewer groups than its peers
    splits some.

    Raises:
        UserError: fewer rows than groups wanted.
    """
    parts = list(groups)
    rows = sum(len(part) for part in parts)
    if count > rows:
        raise UserError(
            f"a rank holds {rows} sequences but a peer needs {count} micro-batches; use larger global batches"
        )
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts


def cut_rows(
    data: dict[str, torch.Tensor], groups: Sequence[torch.Tensor], *, multiple: int = 1
) -> Iterator[MicroBatch]:
    """Yield the rows of each group, cut to the group's longest row.

    Args:
        data: tensors with leading dim B; `input_ids` [B, S] and `input_lengths` [B] are needed.
        groups: row indices of each micro-batch.
        multiple: a micro-batch's length is padded up to this (context parallelism needs it), routes with -1 (not
            recorded), everything else with 0.
    """
    lengths, width = data["input_lengths"].long(), data["input_ids"].shape[1]
    for rows in groups:
        length = round_up(int(lengths[rows].max()), multiple)
        yield MicroBatch(rows, length, {name: _fit(name, tensor[rows], width, length) for name, tensor in data.items()})


def check_lengths(data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return `input_lengths` as int64 [B]; `UserError` if one is not within 1..S."""
    lengths, width = data["input_lengths"].long(), data["input_ids"].shape[1]
    if lengths.numel() and (int(lengths.min()) < 1 or int(lengths.max()) > width):
        raise UserError(
            f"input_lengths span {int(lengths.min())}..{int(lengths.max())}; wanted 1..{width} (the width of input_ids)"
        )
    return lengths


def _fit(name: str, tensor: torch.Tensor, width: int, length: int) -> torch.Tensor:
    if tensor.ndim < 2 or tensor.shape[1] != width:
        return tensor
    if length <= width:
        return tensor[:, :length]
    fill = MISSING_EXPERT if name == ROUTED_EXPERTS else 0
    padding = tensor.new_full((tensor.shape[0], length - width, *tensor.shape[2:]), fill)
    return torch.cat([tensor, padding], dim=1)
