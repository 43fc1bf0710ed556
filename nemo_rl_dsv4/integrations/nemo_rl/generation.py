"""Rollout engines behind NeMo-RL's `GenerationInterface`, and the refit behind its `WeightSynchronizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.rollout import check_generation, sampling_seed
from nemo_rl_dsv4.grpo.settings import ValidationSampling

LOOP_HOOKS = ("clear_logger_metrics", "finish_generation")
"""Calls of NeMo-RL's loop by which a training rollout is told from a validation: see `RolloutClock`."""


class RolloutClock:
    """Which step a rollout is of: the seeds of a run are those of the embedded trainer, and survive a resume.

    NeMo-RL's `generate` is not told the step. Its loop calls `clear_logger_metrics` before each training rollout and
    never before a validation, `finish_generation` after both, and `train` once a step.

    Args:
        seed: `grpo.seed`.
        step: steps done.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        self.seed, self.step = seed, step
        self._batch = self._validation = 0
        self.training = False

    def start_training_rollout(self) -> None:
        """The next rollout is a batch of the step in progress."""
        self._batch, self.training = self._batch + 1, True

    def finish_rollout(self) -> None:
        """What follows is a validation unless `start_training_rollout` says otherwise."""
        self._validation, self.training = 0, False

    def trained(self) -> None:
        """A step is over."""
        self.step, self._batch = self.step + 1, 0

    def next_seed(self) -> int:
        """Seed of the batch that is generated now."""
        if self.training:
            return sampling_seed(self.seed, "train", self.step + 1, self._batch)
        number, self._validation = self._validation, self._validation + 1
        return sampling_seed(self.seed, "validation", 0, number)


class EngineGeneration:
    """A group of engines as NeMo-RL's loop calls a generation backend.

    Args:
        engines: `ReferenceGeneration` or `VllmGeneration`.
        clock: shared with the policy.
        validation: how validation samples.
        batch_type: NeMo-RL's `BatchedDataDict`.
    """

    weight_synchronizer: Any
    """Set once policy and engines are there; NeMo-RL's refit asks it for every transfer."""

    def __init__(
        self,
        engines: Any,
        clock: RolloutClock,
        validation: ValidationSampling,
        batch_type: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self._engines, self._clock, self._validation, self._batch_type = engines, clock, validation, batch_type

    def generate(self, data: Mapping[str, Any], greedy: bool) -> Any:
        """Continue right-padded prompts.

        Args:
            data: `input_ids` int64 [B, P], `input_lengths` [B], `stop_strings`: B times None.
            greedy: take the likeliest token.

        Returns:
            As `EngineGroup.generate`, in NeMo-RL's `BatchedDataDict`.

        Raises:
            UserError: stop strings of single prompts.
        """
        given = [strings for strings in data.get("stop_strings") or [] if strings]
        if given:
            raise UserError(
                f"a prompt has stop strings of its own ({given[0]!r}); set them for all in "
                "policy.generation.stop_strings"
            )
        training = self._clock.training
        sampling = {} if training else asdict(self._validation)
        prompts = {"input_ids": data["input_ids"], "input_lengths": data["input_lengths"].to(torch.int64)}
        output = self._engines.generate(prompts, greedy=greedy, seed=self._clock.next_seed(), **sampling)
        check_generation(output, prompts["input_lengths"])
        return self._batch_type(dict(output))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Wake the engines."""
        self._engines.prepare_for_generation()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Put the engines to sleep."""
        self._engines.finish_generation()
        self._clock.finish_rollout()
        return True

    def clear_logger_metrics(self) -> None:
        """Called before each training rollout; see `RolloutClock`."""
        self._clock.start_training_rollout()

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Nothing to connect: weights go through `weight_synchronizer`."""
        return []

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Nothing to prepare: a refit names its tensors itself."""

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """The policy's side has sent and loaded them."""
        return []

    def update_weights_from_collective(self) -> list[Any]:
        """The policy's side has sent and loaded them."""
        return []

    def shutdown(self) -> bool:
        """End the processes."""
        self._engines.shutdown()
        return True


class Refit:
    """Gives the engines the policy's weights: a `WeightSynchronizer` of NeMo-RL.

    Args:
        policy: `GroupPolicy`.
        generation: `EngineGeneration`.
    """

    def __init__(self, policy: Any, generation: Any) -> None:
        self._policy, self._generation = policy, generation
        self._synced = False

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Export, send, load, compare checksums, and wake the engines; returns what to log under `refit/`."""
        self._policy.finish_training()
        metrics = self._policy.send_weights(kv_scales)
        self._generation.prepare_for_generation()
        self._synced = True
        return metrics

    @property
    def is_stale(self) -> bool:
        """True until the first transfer."""
        return not self._synced

    def init_communicator(self) -> None:
        """Nothing to connect."""

    def shutdown(self) -> None:
        """Nothing to free."""
