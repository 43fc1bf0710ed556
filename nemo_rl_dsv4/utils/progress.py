"""Progress of long phases: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 15.0


class Advance(Protocol):
    """Reports progress: `advance(n)` for n more items, with a short note beside the bar."""

    def __call__(self, items: int = 1, note: str = "") -> None: ...


class PhaseBar:
    """A bar that disappears when the phase ends.

    Args:
        console: a terminal.
        description: what goes on.
        total: items of work; null shows a spinner only.
    """

    def __init__(self, console: Console, description: str, total: int | None) -> None:
        # A terminal of 80 columns has room for all of it; the bar gives way first.
        width = max(8, min(40, console.width - len(description) - 50))
        count = [MofNCompleteColumn(), TimeRemainingColumn(compact=True), BarColumn(bar_width=width)] if total else []
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *count,
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(description, total=total, note="")
        self._bar.start()

    def advance(self, items: int = 1, note: str = "") -> None:
        """`items` more are done."""
        self._bar.update(self._task, advance=items, note=note)

    def stop(self) -> None:
        """Takes the bar off the screen."""
        self._bar.stop()


class PhaseLines:
    """At most a line every 15 seconds, so that a log file stays short. Arguments as for `PhaseBar`."""

    def __init__(self, console: Console, description: str, total: int | None) -> None:
        self._console, self._description = console, description
        self._of = f"/{total}" if total else ""
        self._done = 0
        self._last_line = time.monotonic()

    def advance(self, items: int = 1, note: str = "") -> None:
        """`items` more are done."""
        self._done += items
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        line = f"{self._description}: {self._done}{self._of}{' ' if note else ''}{note}"
        self._console.print(Text(line), soft_wrap=True)

    def stop(self) -> None:
        """Nothing is left to take away."""


def start_phase(console: Console, description: str, total: int | None = None) -> PhaseBar | PhaseLines:
    """The display of one phase that fits the console; the caller stops it."""
    return (PhaseBar if console.is_terminal else PhaseLines)(console, description, total)


@contextmanager
def bytes_progress(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a long read or write whose size is known only once it goes on, in MiB.

    Yields a function of (bytes done, bytes in all); nothing is shown before its first call.
    """
    started = time.monotonic()
    display: PhaseBar | PhaseLines | None = None
    shown = 0

    def report(done: int, total: int) -> None:
        nonlocal display, shown
        if display is None:
            display = start_phase(console, f"{description} (MiB)", max(1, total >> 20))
        display.advance((done >> 20) - shown)
        shown = done >> 20

    if not console.is_terminal:
        console.print(Text(f"{description} ..."), soft_wrap=True)
    try:
        yield report
    finally:
        if display is not None:
            display.stop()
    console.print(Text(f"{description}: done in {time.monotonic() - started:.1f} s"), soft_wrap=True)


@contextmanager
def progress(console: Console, description: str, total: int | None = None) -> Iterator[Advance]:
    """Shows how far a long job outside the steps is, such as the warm start, and how long it took.

    Yields a function to call after each item of `total`.
    """
    started = time.monotonic()
    if not console.is_terminal:
        console.print(Text(f"{description} ..."), soft_wrap=True)
    display = start_phase(console, description, total)
    try:
        yield display.advance
    finally:
        display.stop()
    console.print(Text(f"{description}: done in {time.monotonic() - started:.1f} s"), soft_wrap=True)
