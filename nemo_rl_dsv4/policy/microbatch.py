"""Cut a batch into micro-batches of similar length.

Shapes: B sequences, S tokens. Rows are right-padded, so cutting trailing columns that are padding for every row of a
micro-batch changes no result; sorting rows by length makes the cut large. Every rank of an expert-parallel group has to run
the same number of forward passes, so the number of micro-batches depends on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.errors import UserError


@dataclass(frozen=True)
class MicroBatch:
    """`rows`: int64 indices into the batch; `data`: those rows of every tensor, cut to `length` columns."""

    rows: torch.Tensor
    length: int
    data: dict[str, torch.Tensor]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def micro_batches(
    data: dict[str, torch.Tensor], size: int, *, multiple: int = 1, pad_values: dict[str, float] | None = None
) -> Iterator[MicroBatch]:
    """Yield the rows of `data` in micro-batches of `size`, shortest first.

    Args:
        data: tensors with leading dim B; `input_ids` [B, S] and `input_lengths` [B] are needed.
        size: rows per micro-batch; the last one may be smaller.
        multiple: every micro-batch's length is padded up to this (context parallelism needs it).
        pad_values: value for columns added beyond S, by tensor name; 0 where not named.

    Raises:
        UserError: a length that is not within 1..S.
    """
    lengths, width = data["input_lengths"].long(), data["input_ids"].shape[1]
    if lengths.numel() and (int(lengths.min()) < 1 or int(lengths.max()) > width):
        raise UserError(
            f"input_lengths span {int(lengths.min())}..{int(lengths.max())}; wanted 1..{width} (the width of input_ids)"
        )
    order = torch.argsort(lengths, stable=True)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        length = round_up(int(lengths[rows].max()), multiple)
        cut = {
            name: _fit(tensor[rows], width, length, (pad_values or {}).get(name, 0)) for name, tensor in data.items()
        }
        yield MicroBatch(rows, length, cut)


def _fit(tensor: torch.Tensor, width: int, length: int, pad_value: float) -> torch.Tensor:
    if tensor.ndim < 2 or tensor.shape[1] != width:
        return tensor
    if length <= width:
        return tensor[:, :length]
    extra = tensor.new_full((tensor.shape[0], length - width, *tensor.shape[2:]), pad_value)
    return torch.cat([tensor, extra], dim=1)
