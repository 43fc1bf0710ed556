"""CPU rollout engines as Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch

from nemo_rl_dsv4.generation.engine_group import EngineGroup
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.utils.hosts import Host
from nemo_rl_dsv4.utils.ray_calls import CPU_WORKER_OPTIONS, merged

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
        precision: `float32` or `bfloat16`, of weights and activations.
        refit_checks: weights compared with what was sent after each refit: `sampled` or `all`.
        refit_on_finding: `stop` raises when a refit is found wrong, `warn` only reports it.
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
    precision: str = "float32"
    refit_checks: Literal["sampled", "all"] = "sampled"
    refit_on_finding: Literal["stop", "warn"] = "stop"


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
            dtype=getattr(torch, spec.precision),
        )
        self.spec = spec
        return self.engine.rounded_sites

    def update_weights(self, shipment: Shipment) -> dict[str, Any]:
        """Load exported weights, compare with the sender's checksum, and return the refit report."""
        from nemo_rl_dsv4.refit.report import require_valid
        from nemo_rl_dsv4.refit.wire import from_wire

        report = self.engine.update_weights(
            from_wire(shipment.tensors), shipment.checksum, checks=self.spec.refit_checks
        )
        require_valid(report, on_finding=self.spec.refit_on_finding)
        return report.to_dict()

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seed: int, request_ids: list[int]
    ) -> list[Any]:
        """Continue prompts; see `ReferenceEngine.generate`."""
        return self.engine.generate(prompts, params, seed=seed, request_ids=request_ids)


class ReferenceGeneration(EngineGroup):
    """A rollout on `num_workers` CPU engines.

    The processes start at once and import their libraries while the caller goes on; `build` gives them a model.

    Args:
        params: the recipe's sampling parameters.
        pad_id: id that fills `output_ids` behind a response.
        num_workers: engines; prompts are dealt over them.
        on_progress: called with the number of responses each time some are finished.
        hosts: nodes that take the engines in turn; without any Ray chooses.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        pad_id: int,
        num_workers: int = 1,
        hosts: Sequence[Host] = (),
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        def start(number: int) -> Any:
            host = hosts[number % len(hosts)].options() if hosts else {}
            return ReferenceActor.options(**merged(CPU_WORKER_OPTIONS, host)).remote()

        super().__init__(
            start,
            num_workers,
            params,
            pad_id=pad_id,
            on_progress=on_progress,
        )

    def prepare_for_generation(self) -> None:
        """Nothing to wake on a CPU."""

    def finish_generation(self) -> None:
        """Nothing to put to sleep on a CPU."""
