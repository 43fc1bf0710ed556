"""Where a step's rollouts come from: made when they are needed, or ahead of time while the policy trains.

`Alternating` rolls out with the weights of the step. `Ahead` rolls out the next batches in a thread while the policy
trains on this one; their weights are then older than the policy's, by at most `max_age` updates. Invariants of `Ahead`:
- The engine is never given weights while it generates.
- Batches are made in the order of their steps, each from its own seed, so their prompts are those of `Alternating`.
- A checkpoint notes the loader as it was after the batch of its step: batches that nobody trained on are made again.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.protocols import Loader
from nemo_rl_dsv4.grpo.rollout import StepRollouts

Gather = Callable[[int, Phases], StepRollouts]
"""Rolls out the batch of a step and times itself."""


@dataclass(frozen=True)
class Position:
    """How far the loader was at some moment; what a checkpoint notes of it."""

    epoch: int
    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """As `Loader.state_dict`."""
        return self.state

    @classmethod
    def of(cls, loader: Loader) -> "Position":
        """Now."""
        return cls(loader.epoch, dict(loader.state_dict()))


class RolloutSource(Protocol):
    """Gives the trainer the batch of one step after another."""

    def batch(self, step: int) -> StepRollouts:
        """The rollouts of `step`, and the engine with weights as the source needs them."""
        ...

    def position(self) -> Position:
        """The loader after the last batch that was given out."""
        ...

    def settle(self) -> None:
        """Wait until the engine is idle."""
        ...

    def background_seconds(self) -> dict[str, float]:
        """Seconds by phase of the last batch, where another thread spent them."""
        ...

    def close(self) -> None:
        """Begin nothing more."""
        ...


class Alternating:
    """Roll out, then train, then roll out.

    Args:
        gather: rolls out a step's batch.
        refit: gives the engine the policy's weights, if they changed.
        loader: of the prompts.
        phases: of the trainer.
    """

    def __init__(self, gather: Gather, refit: Callable[[], None], loader: Loader, phases: Phases) -> None:
        self._gather, self._refit, self._loader, self._phases = gather, refit, loader, phases

    def batch(self, step: int) -> StepRollouts:
        """See `RolloutSource`."""
        self._refit()
        return self._gather(step, self._phases)

    def position(self) -> Position:
        """See `RolloutSource`."""
        return Position.of(self._loader)

    def settle(self) -> None:
        """The engine is always idle between batches."""

    def background_seconds(self) -> dict[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True)
class _Made:
    rollouts: StepRollouts
    position: Position
    updates: int
    """Optimizer steps of the weights that it was sampled with, in steps of the run."""
    seconds: dict[str, float]


class Ahead:
    """Roll out while the policy trains.

    Args:
        gather, refit, loader, phases: as of `Alternating`; `gather` is called in another thread.
        max_age: updates that may lie between the weights of a batch and those it trains.
        last_step: no batch is made for a later one.
    """

    def __init__(
        self,
        gather: Gather,
        refit: Callable[[], None],
        loader: Loader,
        phases: Phases,
        *,
        max_age: int,
        last_step: int,
    ) -> None:
        self._gather, self._refit, self._loader, self._phases = gather, refit, loader, phases
        self._max_age, self._last_step = max_age, last_step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._coming: dict[int, Future[_Made]] = {}
        self._given: _Made | None = None

    def batch(self, step: int) -> StepRollouts:
        """The batch of `step`; starts those that its weights may still be used for.

        Raises:
            Exception: what rolling out raised.
        """
        if step not in self._coming:
            self._begin(step, updates=step - 1)
        with self._phases.phase("exposed_generation"):
            made = self._coming.pop(step).result()
        self._given = made
        # With the next batch under way the engine is busy: weights wait until it is needed again.
        if step + 1 not in self._coming and step < self._last_step:
            last = min(step + self._max_age, self._last_step)
            self._begin(*range(step + 1, last + 1), updates=step - 1)
        age = step - 1 - made.updates
        return made.rollouts._replace(metrics={**made.rollouts.metrics, "trajectory_age": float(age)})

    def _begin(self, *steps: int, updates: int) -> None:
        """Refit the idle engine and start the batches of `steps`."""
        self.settle()
        self._refit()
        for step in steps:
            self._coming[step] = self._pool.submit(self._make, step, updates)

    def _make(self, step: int, updates: int) -> _Made:
        phases = Phases()
        rollouts = self._gather(step, phases)
        return _Made(rollouts, Position.of(self._loader), updates, phases.seconds())

    def position(self) -> Position:
        """See `RolloutSource`."""
        assert self._given is not None, "no batch was given out yet"
        return self._given.position

    def settle(self) -> None:
        """Wait for the batches under way; what they raised is raised when they are asked for."""
        with self._phases.phase("exposed_generation"):
            wait_for(self._coming.values())

    def background_seconds(self) -> dict[str, float]:
        """See `RolloutSource`."""
        seconds = {} if self._given is None else dict(self._given.seconds)
        seconds.pop("total_step_time", None)
        return seconds

    def close(self) -> None:
        """Drop batches that have not begun; one that has is left to end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
