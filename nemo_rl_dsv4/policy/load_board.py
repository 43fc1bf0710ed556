"""How far rank 0 is with loading its part of a checkpoint, told to the driver while the rank is busy.

A rank that loads answers no calls. It writes to a board, an actor that does nothing else, which the driver reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from nemo_rl_dsv4.utils.ray_calls import get, kill

SECONDS_BETWEEN_READS = 0.5


@ray.remote(num_cpus=0)
class LoadBoard:
    """Holds the last (bytes read, bytes to read)."""

    def __init__(self) -> None:
        self._state = (0, 0)

    def write(self, done: int, total: int) -> None:
        """Replace what is on the board."""
        self._state = (done, total)

    def read(self) -> tuple[int, int]:
        """What is on the board; (0, 0) before the first write."""
        return self._state


def reporter(board: Any) -> Callable[[int, int], None]:
    """A rank's side: writes to `board` at most every half second, and at the end."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= SECONDS_BETWEEN_READS:
            last = now
            board.write.remote(done, total)

    return report


@contextmanager
def watched(on_load: Callable[[int, int], None]) -> Iterator[tuple[Any, Callable[[Sequence[Any]], None]]]:
    """The driver's side: a board, and a function that passes its content on until all `refs` are done."""
    board = LoadBoard.remote()

    def watch(refs: Sequence[Any]) -> None:
        waiting = list(refs)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=SECONDS_BETWEEN_READS)
            done, total = get([board.read.remote()])[0]
            if total:
                on_load(done, total)

    try:
        yield board, watch
    finally:
        kill([board])
