"""Which rows share a packed sequence: bin packing under a token limit.

Lengths count as they stand in a packed sequence, padded to a multiple of 128 (`layout.DOCUMENT_MULTIPLE`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.layout import DOCUMENT_MULTIPLE
from nemo_rl_dsv4.policy.microbatch import round_up

Bins = list[list[int]]


@dataclass(frozen=True)
class Packing:
    """NeMo-RL's `policy.sequence_packing`: tokens of a micro-batch in training and in scoring, and how to fill it."""

    train_tokens: int
    logprob_tokens: int
    algorithm: str = "modified_first_fit_decreasing"


def pack_rows(lengths_B: torch.Tensor, capacity: int, algorithm: str) -> list[torch.Tensor]:
    """Row indices of each micro-batch, every row in exactly one.

    Args:
        lengths_B: int64 [B], tokens of each row.
        capacity: tokens that a packed sequence holds, padding of the rows included.
        algorithm: `concatenative` (rows in order), `first_fit_decreasing`, or `modified_first_fit_decreasing`.

    Raises:
        UserError: a row does not fit, or an unknown algorithm.
    """
    padded = [round_up(length, DOCUMENT_MULTIPLE) for length in lengths_B.tolist()]
    if padded and max(padded) > capacity:
        raise UserError(
            f"a row of {int(lengths_B.max())} tokens takes {max(padded)} in a packed sequence (a multiple of "
            f"{DOCUMENT_MULTIPLE}), more than policy.sequence_packing.train_mb_tokens or logprob_mb_tokens = "
            f"{capacity}; raise it"
        )
    if algorithm not in ALGORITHMS:
        raise UserError(f"policy.sequence_packing.algorithm is {algorithm!r}; wanted one of {sorted(ALGORITHMS)}")
    return [torch.tensor(sorted(bin), dtype=torch.long) for bin in ALGORITHMS[algorithm](padded, capacity)]


def concatenative(sizes: list[int], capacity: int) -> Bins:
    """Rows in order; a new bin where the next row does not fit."""
    bins: Bins = []
    room = 0
    for row, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(row)
        room -= size
    return bins


def first_fit_decreasing(sizes: list[int], capacity: int) -> Bins:
    """Longest first, each into the first bin with room: at most 11/9 of the best number of bins, and 6/9 of one."""
    bins: Bins = []
    _first_fit(_longest_first(range(len(sizes)), sizes), sizes, bins, capacity)
    return bins


def modified_first_fit_decreasing(sizes: list[int], capacity: int) -> Bins:
    """First fit decreasing that pairs middle-sized rows first: at most 71/60 of the best number of bins, and 31/6.

    Source: D. S. Johnson and M. R. Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1 (1985).
    """
    order = _longest_first(range(len(sizes)), sizes)
    large = [row for row in order if 2 * sizes[row] > capacity]
    medium = [row for row in order if capacity < 3 * sizes[row] and 2 * sizes[row] <= capacity]
    small = [row for row in order if capacity < 6 * sizes[row] and 3 * sizes[row] <= capacity]
    rest = [row for row in order if 6 * sizes[row] <= capacity]
    bins: Bins = [[row] for row in large]
    room = [capacity - sizes[row] for row in large]
    # Forward: the largest medium row beside each large one, where any fits.
    for index, bin in enumerate(bins):
        _take_largest(medium, sizes, room, index, bin)
    # Backward: two small rows beside a large one that has no medium one, the smallest and the largest that still fits.
    for index in reversed(range(len(bins))):
        if len(bins[index]) > 1 or len(small) < 2 or sizes[small[-1]] + sizes[small[-2]] > room[index]:
            continue
        smallest = small.pop()
        bins[index].append(smallest)
        room[index] -= sizes[smallest]
        _take_largest(small, sizes, room, index, bins[index])
    # Forward: whatever is largest and fits, as long as something does; then plain first fit for what is left.
    left = _longest_first([*medium, *small, *rest], sizes)
    for index, bin in enumerate(bins):
        while _take_largest(left, sizes, room, index, bin):
            pass
    remaining: Bins = []
    _first_fit(left, sizes, remaining, capacity)
    return bins + remaining


ALGORITHMS: dict[str, Callable[[list[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


def _longest_first(rows, sizes: list[int]) -> list[int]:
    return sorted(rows, key=lambda row: -sizes[row])


def _take_largest(candidates: list[int], sizes: list[int], room: list[int], index: int, bin: list[int]) -> bool:
    """Move the largest candidate that fits from `candidates` (longest first) into the bin; false where none fits."""
    row = next((row for row in candidates if sizes[row] <= room[index]), None)
    if row is None:
        return False
    candidates.remove(row)
    bin.append(row)
    room[index] -= sizes[row]
    return True


def _first_fit(rows: list[int], sizes: list[int], bins: Bins, capacity: int) -> None:
    room: list[int] = []
    for row in rows:
        index = next((i for i, free in enumerate(room) if sizes[row] <= free), None)
        if index is None:
            bins.append([])
            room.append(capacity)
            index = len(bins) - 1
        bins[index].append(row)
        room[index] -= sizes[row]
