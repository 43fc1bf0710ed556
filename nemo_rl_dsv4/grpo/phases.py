"""Time and progress of the named phases of a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from nemo_rl_dsv4.grpo.protocols import Progress


class Phases:
    """Times phases and tells a console about them.

    The same object may be handed to an engine that knows how far it is: `phases.advance` inside a phase. What the
    engine did not report, the trainer makes up with `reach`, so a bar always ends full.

    Args:
        progress: the console, or None for silence.
        clock: seconds; replaced in tests.
    """

    def __init__(self, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._progress = progress
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._step_start = clock()
        self._total = 0
        self._done = 0

    def start_step(self) -> None:
        """Forget the times of the previous step and start the clock of this one."""
        self._seconds = {}
        self._step_start = self._clock()

    @contextmanager
    def phase(self, name: str, total: int = 0) -> Iterator[None]:
        """Time a phase of `total` units; a name that occurs twice in a step adds up."""
        self._total, self._done = total, 0
        start = self._clock()
        if self._progress is not None:
            self._progress.on_phase_start(name, total)
        try:
            yield
            self.reach(total)
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            if self._progress is not None:
                self._progress.on_phase_end()

    def advance(self, units: int) -> None:
        """`units` more are done."""
        units = min(units, self._total - self._done)
        if units > 0:
            self._done += units
            if self._progress is not None:
                self._progress.on_phase_progress(units)

    def reach(self, done: int) -> None:
        """At least `done` units of this phase are done."""
        self.advance(done - self._done)

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        if self._progress is not None:
            self._progress.on_step(step, metrics)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since `start_step`, and `total_step_time`."""
        return {**self._seconds, "total_step_time": self._clock() - self._step_start}
