"""CPU rollout engines as Ray actors behind the trainer's `Generation` protocol.

Invariants:
- Every engine holds the same weights: a refit reaches all of them before the next batch.
- A request's random numbers depend on the seed and its row alone, so the number of engines changes no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
import torch

from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.routes import ROUTED_EXPERTS, pack_routes
from nemo_rl_dsv4.utils.ray_calls import CPU_WORKER_OPTIONS, get, kill

if TYPE_CHECKING:
    from nemo_rl_dsv4.refit.wire import Shipment


@dataclass(frozen=True)
class ReferenceSpec:
    """Settings of one CPU rollout engine.

    Attributes:
        hf_config: official `config.json` of the model.
        profile: name of the rollout profile it rounds by.
        tokenizer: name or folder, read only where stop strings need text.
        batch_size: most sequences decoded together.
        length_slack: most tokens by which prompt lengths of one batch may differ.
        experts: transformers' implementation of the expert products.
        num_threads: torch threads of the process.
        max_length: most tokens of prompt and response together; None for the model's limit.
        capture_routes: record and return the experts of every token.
    """

    hf_config: Mapping[str, Any]
    profile: str
    tokenizer: str | None = None
    batch_size: int = 128
    length_slack: int = 12
    experts: str = "eager"
    num_threads: int = 1
    max_length: int | None = None
    capture_routes: bool = False


@ray.remote
class ReferenceActor:
    """One engine's process."""

    def build(self, spec: ReferenceSpec) -> dict[str, int]:
        """Build the engine and return its rounded sites."""
        torch.set_num_threads(spec.num_threads)
        from nemo_rl_dsv4.generation.reference import ReferenceEngine
        from nemo_rl_dsv4.numerics import get_profile

        decode = None
        if spec.tokenizer is not None:
            from nemo_rl_dsv4.data.tokenizer import load_tokenizer

            decode = load_tokenizer(spec.tokenizer).decode
        self.engine = ReferenceEngine(
            spec.hf_config,
            get_profile(spec.profile),
            max_batch_size=spec.batch_size,
            length_slack=spec.length_slack,
            experts=spec.experts,
            max_length=spec.max_length,
            decode=decode,
            capture_routes=spec.capture_routes,
        )
        return self.engine.rounded_sites

    def update_weights(self, shipment: Shipment) -> dict[str, Any]:
        """Load exported weights, compare with the sender's checksum, and return the refit report."""
        from nemo_rl_dsv4.refit.wire import from_wire

        report = self.engine.update_weights(from_wire(shipment.tensors))
        if report.checksum != shipment.checksum:
            self.engine.has_weights = False
            raise RuntimeError(
                f"refit: the engine received checksum {report.checksum}, the policy sent {shipment.checksum}; "
                "weights were changed on the way"
            )
        return report.to_dict()

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seed: int, request_ids: list[int]
    ) -> list[Any]:
        """Continue prompts; see `ReferenceEngine.generate`."""
        return self.engine.generate(prompts, params, seed=seed, request_ids=request_ids)


class ReferenceGeneration:
    """A rollout on `num_workers` CPU engines.

    The processes start at once and import their libraries while the caller goes on; `build` gives them a model.

    Args:
        params: the recipe's sampling parameters.
        pad_id: id that fills `output_ids` behind a response.
        num_workers: engines; prompts are dealt over them.
        on_progress: called with the number of responses each time some are finished.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        pad_id: int,
        num_workers: int = 1,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.params, self.pad_id, self.on_progress = params, pad_id, on_progress
        self.actors = [ReferenceActor.options(**CPU_WORKER_OPTIONS).remote() for _ in range(num_workers)]

    def build(self, spec: ReferenceSpec) -> dict[str, int]:
        """Build every engine; return the rounded sites of one."""
        self.batch_size, self.capture_routes = spec.batch_size, spec.capture_routes
        return get([actor.build.remote(spec) for actor in self.actors])[0]

    def update_weights(self, stream: Any) -> dict[str, float]:
        """Load exported weights (or a Ray reference to them) into every engine.

        Returns:
            Numbers of the refit report.

        Raises:
            UserError: the stream was incomplete or damaged.
            RuntimeError: an engine received other bytes than the policy sent.
        """
        reports = get([actor.update_weights.remote(stream) for actor in self.actors])
        return {key: float(value) for key, value in reports[0].items() if isinstance(value, (int, float))}

    def prepare_for_generation(self) -> None:
        """Nothing to wake on a CPU."""

    def finish_generation(self) -> None:
        """Nothing to put to sleep on a CPU."""

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

    def _run(self, prompts: list[list[int]], params: SamplingParams, seed: int):
        """Yield (rows, completions) as engines finish. Rows of similar length share a task."""
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        share = max(1, min(self.batch_size, -(-len(order) // len(self.actors))))
        tasks = [order[start : start + share] for start in range(0, len(order), share)]
        idle, running = list(self.actors), {}
        while tasks or running:
            while tasks and idle:
                rows, actor = tasks.pop(), idle.pop()
                ref = actor.generate.remote([prompts[row] for row in rows], params, seed, rows)
                running[ref] = (rows, actor)
            (ref, *_), _ = ray.wait(list(running), num_returns=1)
            rows, actor = running.pop(ref)
            idle.append(actor)
            yield rows, get([ref])[0]

    def _collate(self, data: Mapping[str, torch.Tensor], done: list[Any], new_tokens: int) -> dict[str, torch.Tensor]:
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
        if self.capture_routes:
            routes = [completion.routed_experts for completion in done]
            output[ROUTED_EXPERTS] = pack_routes(routes, (lengths + generated).tolist(), width + new_tokens)
        return output

    def shutdown(self) -> None:
        """End the processes."""
        kill(self.actors)
