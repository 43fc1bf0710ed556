"""Engines as Ray actors behind the trainer's `Generation` protocol: dealing requests, collecting a batch.

Invariants:
- Every engine holds the same weights: a refit reaches all of them before the next batch.
- A request's random numbers depend on the seed and its row alone, so the number of engines changes no sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from nemo_rl_dsv4.generation.completion import Completion
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.refit.report import refit_metrics
from nemo_rl_dsv4.routes import ROUTED_EXPERTS, pack_routes
from nemo_rl_dsv4.utils.ray_calls import get, kill

MAX_RESTARTS = 3
"""Engines that a run starts again before it gives up."""

log = logging.getLogger(__name__)


class EngineGroup:
    """A rollout on several engines of one kind.

    An engine whose process dies is started again with the weights that all engines hold, and its requests run again:
    their random numbers depend on seed and row alone, so the batch is the one that would have come without the death.
    If it is found dead during a refit, the refit is made again, for all engines.

    Args:
        start: starts the process of one engine, given its number: an actor with `build(spec)`,
            `update_weights(weights)` and `generate(prompts, params, seed, request_ids)`, which returns `Completion`s.
        engines: how many.
        params: the recipe's sampling parameters.
        pad_id: id that fills `output_ids` behind a response.
        on_progress: called with the number of responses each time some are finished.
        timeout: most seconds without any engine finishing a task; None waits for ever.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        engines: int,
        params: SamplingParams,
        *,
        pad_id: int,
        on_progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.params, self.pad_id, self.on_progress, self.timeout = params, pad_id, on_progress, timeout
        self.restarts = 0
        self._start = start
        self._spec: Any = None
        self._weights: Any = None
        self.actors = [start(number) for number in range(engines)]

    def build(self, spec: Any) -> Any:
        """Give every engine its settings; return what one says of itself.

        Args:
            spec: has `batch_size`, the most requests of one task, and `capture_routes`.
        """
        self._spec, self._weights = spec, None
        return get([actor.build.remote(spec) for actor in self.actors])[0]

    def update_weights(self, weights: Any) -> dict[str, float]:
        """Load exported weights into every engine.

        Args:
            weights: what engines load, or a Ray reference to it; or an object whose `deliver(actors)` brings it to them
                and returns their reports.

        Returns:
            Numbers of the refit report.

        Raises:
            UserError: the stream was incomplete or damaged, or an engine received other bytes than the policy sent;
                engines that refused it keep the weights they had.
        """
        kept_as_it_is = isinstance(weights, ray.ObjectRef) or hasattr(weights, "deliver")
        self._weights = weights if kept_as_it_is else ray.put(weights)
        while True:
            try:
                return refit_metrics(self._load(self.actors))
            except RayActorError as error:
                if not self._replace_dead(error):
                    raise  # another process of the run

    def _load(self, actors: list[Any]) -> list[dict[str, Any]]:
        """Give engines the weights of the last update; say what their reports note."""
        if hasattr(self._weights, "deliver"):
            reports = self._weights.deliver(actors)
        else:
            reports = get([actor.update_weights.remote(self._weights) for actor in actors])
        for note in dict.fromkeys(note for report in reports for note in report.get("notes", ())):
            log.warning("refit: %s", note)
        return reports

    def _replace_dead(self, error: Exception) -> int:
        """Start engines in the places of all that are dead, without weights; how many there were."""
        dead = [actor for actor, gone in zip(self.actors, _are_dead(self.actors), strict=True) if gone]
        for actor in dead:
            self._replace(actor, error)
        return len(dead)

    def _replace(self, dead: Any, error: Exception) -> Any:
        """Start an engine in the place of a dead one, without weights; again, should it die as it starts."""
        number = self.actors.index(dead)
        while True:
            self.restarts += 1
            if self.restarts > MAX_RESTARTS:
                raise RuntimeError(
                    f"rollout engines died {self.restarts} times in this run; not started again ({error})"
                ) from error
            log.warning("a rollout engine died (%s); starting it again with the current weights", error)
            kill([self.actors[number]])  # one that does not answer any more may still hold its GPU
            self.actors[number] = actor = self._start(number)
            try:
                get([actor.build.remote(self._spec)])
                return actor
            except RayActorError as again:
                error = again

    def _revive(self, dead: Any, error: Exception) -> Any:
        """Start an engine in the place of a dead one, at the same policy version."""
        while True:
            actor = self._replace(dead, error)
            if self._weights is None:
                return actor
            try:
                self._load([actor])
                return actor
            except RayActorError as again:
                if not _are_dead([actor])[0]:
                    raise  # another process of the run
                dead, error = actor, again

    def generate(
        self, data: Mapping[str, torch.Tensor], *, greedy: bool, seed: int, **sampling: Any
    ) -> dict[str, torch.Tensor]:
        """Continue right-padded prompts.

        Args:
            data: `input_ids` int64 [B, P] and `input_lengths` int64 [B].
            greedy: take the likeliest token.
            seed: with a row's index it fixes that row's draws.
            sampling: `temperature`, `top_p`, `top_k` in place of the recipe's.

        Returns:
            `output_ids` int64 [B, P + N], `generation_lengths`, `unpadded_sequence_lengths` int64 [B], `logprobs`
            float32 [B, P + N] (0 outside the response), `truncated` bool [B]. If the engines record routes, also
            `routed_experts` int16 [B, P + N, L, K], -1 on the last token of a row and behind it.
        """
        params = replace(self.params, **sampling)
        if greedy:
            params = replace(params, temperature=0.0)
        prompts = [row[:length].tolist() for row, length in zip(data["input_ids"], data["input_lengths"], strict=True)]
        done: list[Any] = [None] * len(prompts)
        for rows, completions in self._run(prompts, params, seed):
            for row, completion in zip(rows, completions, strict=True):
                done[row] = completion
            if self.on_progress is not None:
                self.on_progress(len(rows))
        return self._collate(data, done, params.max_new_tokens)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams, seed: int
    ) -> Iterator[tuple[list[int], list[Completion]]]:
        """Yield (rows, completions) as engines finish. Rows of similar length share a task."""
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        share = max(1, min(self._spec.batch_size, -(-len(order) // len(self.actors))))
        tasks = [order[start : start + share] for start in range(0, len(order), share)]
        idle, running = list(self.actors), {}
        while tasks or running:
            while tasks and idle:
                rows, actor = tasks.pop(), idle.pop()
                ref = actor.generate.remote([prompts[row] for row in rows], params, seed, rows)
                running[ref] = (rows, actor)
            finished, _ = ray.wait(list(running), num_returns=1, timeout=self.timeout)
            if not finished:
                raise RuntimeError(
                    f"no rollout engine finished a task within {self.timeout:g} s; {len(running)} of them are busy "
                    f"with {sum(len(rows) for rows, _ in running.values())} requests"
                )
            rows, actor = running.pop(finished[0])
            try:
                completions = get(finished)[0]
            except RayActorError as error:
                idle.append(self._revive(actor, error))
                tasks.append(rows)
                continue
            idle.append(actor)
            yield rows, completions

    def _collate(
        self, data: Mapping[str, torch.Tensor], done: list[Completion], new_tokens: int
    ) -> dict[str, torch.Tensor]:
        lengths = data["input_lengths"].long()
        batch, width = data["input_ids"].shape
        output_ids = torch.full((batch, width + new_tokens), self.pad_id, dtype=torch.long)
        logprobs = torch.zeros(batch, width + new_tokens)
        generated = torch.tensor([len(completion.tokens) for completion in done], dtype=torch.long)
        for row, completion in enumerate(done):
            start, count = int(lengths[row]), len(completion.tokens)
            output_ids[row, :start] = data["input_ids"][row, :start]
            output_ids[row, start : start + count] = torch.tensor(completion.tokens)
            logprobs[row, start : start + count] = torch.tensor(completion.logprobs)
        output = {
            "output_ids": output_ids,
            "generation_lengths": generated,
            "unpadded_sequence_lengths": lengths + generated,
            "logprobs": logprobs,
            "truncated": torch.tensor([completion.truncated for completion in done]),
        }
        if self._spec.capture_routes:
            routes = [completion.routed_experts for completion in done]
            output[ROUTED_EXPERTS] = pack_routes(routes, (lengths + generated).tolist(), width + new_tokens)
        return output

    def shutdown(self) -> None:
        """End the processes."""
        kill(self.actors)


def _are_dead(actors: list[Any]) -> list[bool]:
    """Whether each actor's process has ended; waits for what they are busy with."""
    found = []
    for answer in [actor.__ray_ready__.remote() for actor in actors]:
        try:
            ray.get(answer)
            found.append(False)
        except RayActorError:
            found.append(True)
    return found
