"""The group of training ranks behind NeMo-RL's `ColocatablePolicyInterface`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import POLICY, write_manifest
from nemo_rl_dsv4.grpo.step_metrics import training_metrics
from nemo_rl_dsv4.integrations.nemo_rl.generation import RolloutClock
from nemo_rl_dsv4.integrations.nemo_rl.loss import UpstreamLoss
from nemo_rl_dsv4.routes import ROUTED_EXPERTS

BATCH_NAMES = (
    "input_ids",
    "input_lengths",
    "generation_logprobs",
    "token_mask",
    "sample_mask",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    ROUTED_EXPERTS,
)
BESIDE_INTERFACE = ("get_free_memory_bytes", "finalize_async_save")
"""What NeMo-RL's loop calls although its interface does not declare it."""


def plain_batch(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of NeMo-RL's batch that training reads, whole in memory, lengths as int64.

    Raises:
        UserError: one of them is not a tensor, or has another number of rows.
    """
    batch = {}
    for name in BATCH_NAMES:
        if name not in data:
            continue
        value = data[name]
        if not isinstance(value, Tensor):
            raise UserError(f"NeMo-RL's batch has {name} as {type(value).__name__}; a tensor is wanted")
        batch[name] = value.to(torch.int64).contiguous() if name == "input_lengths" else value.contiguous()
    rows = {name: len(value) for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise UserError(f"NeMo-RL's batch has tensors of different numbers of rows: {rows}")
    return batch


def loop_metrics(result: Mapping[str, Any], data: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Metrics of a step as NeMo-RL's loop takes them: name -> list that it sums, averages or takes the extreme of.

    One number a name, combined as the embedded trainer does, so that none of these changes it.
    """
    metrics = training_metrics(result, dict(data))
    return {name: [value] for name, value in metrics.items() if name != "grad_norm"}


class GroupPolicy:
    """A `PolicyGroup` as NeMo-RL's loop calls a policy.

    Args:
        group: the ranks.
        clock: shared with the generation.
        batch_type: NeMo-RL's `BatchedDataDict`.
        notes: {file name: text} for a checkpoint folder, as `CheckpointStore` takes it.
    """

    def __init__(
        self,
        group: Any,
        clock: RolloutClock,
        batch_type: Callable[[dict[str, Any]], Any] = dict,
        notes: Callable[[Path], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._group, self._clock, self._batch_type, self._notes = group, clock, batch_type, notes
        self._engines: Any = None
        self._pending: tuple[Path, Callable[[], Mapping[str, str]] | None] | None = None

    # Scoring and training -----------------------------------------------------------------------------------------

    def get_logprobs(self, data: Mapping[str, Any], timer: Any = None) -> Any:
        """`logprobs` float32 [B, S] under the current weights."""
        return self._batch_type(dict(self._group.get_logprobs(plain_batch(data))))

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        """`reference_logprobs` float32 [B, S] under the initial weights."""
        return self._batch_type(dict(self._group.get_reference_policy_logprobs(plain_batch(data))))

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: Any,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any = None,
    ) -> dict[str, Any]:
        """Update on a step's rows.

        Returns:
            `loss` float32 [updates], `grad_norm` float32 [] (mean over updates), `all_mb_metrics`.

        Raises:
            UserError: evaluation, or a batch size other than the recipe's.
        """
        if eval_mode:
            raise UserError("train(eval_mode=True) is not supported; score with get_logprobs")
        for name, asked, have in (
            ("gbs", gbs, self._group.global_batch_size),
            ("mbs", mbs, self._group.spec.micro_batch_size),
        ):
            if asked is not None and asked != have:
                raise UserError(f"train({name}={asked}): the ranks were built for {have}; change the recipe")
        batch = plain_batch(data)
        result = self._group.train(batch, UpstreamLoss(loss_fn, self._batch_type))
        self._clock.trained()
        return {
            "loss": result["loss"].to(torch.float32),
            "grad_norm": result["grad_norm"].to(torch.float32).mean(),
            "all_mb_metrics": loop_metrics(result, batch),
        }

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Wake the ranks."""
        self._group.prepare_for_training()

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Nothing to do: scoring prepares itself."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Put the ranks to sleep."""
        self._group.finish_training()

    # Weights ------------------------------------------------------------------------------------------------------

    def connect(self, engines: Any) -> None:
        """The engines that `send_weights` gives the weights to."""
        self._engines = engines

    def send_weights(self, kv_scales: Mapping[str, float] | None = None) -> dict[str, float]:
        """Export to the engines; returns what to log under `refit/`.

        Raises:
            UserError: scales of a KV cache: DeepSeek-V4's cache has a scale for every token.
        """
        if kv_scales:
            raise UserError(f"{len(kv_scales)} KV-cache scales were given; DeepSeek-V4's cache makes its own")
        return dict(self._group.export_to(self._engines))

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int, kv_scales: Mapping[str, float] | None = None
    ) -> list[Any]:
        """For a NeMo-RL without `weight_synchronizer`: send now, and leave nothing to wait for.

        `buffer_size_bytes` is not used: the engines' buckets have a size of their own.
        """
        self.send_weights(kv_scales)
        return []

    def broadcast_weights_for_collective(
        self,
        kv_scales: Mapping[str, float] | None = None,
        *,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
    ) -> list[Any]:
        """As `stream_weights_via_ipc_zmq`."""
        self.send_weights(kv_scales)
        return []

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int, nccl_peer: str = "nemo"
    ) -> list[Any]:
        """Nothing to connect: weights go through `weight_synchronizer`."""
        return []

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """None: a refit names its tensors itself."""
        return None

    def offload_before_refit(self) -> None:
        """Nothing to do: a refit makes room itself, before and after it sends (`policy.dsv4.trainer_sleep`)."""

    def offload_after_refit(self) -> None:
        """As `offload_before_refit`."""

    def get_free_memory_bytes(self) -> int:
        """0: asked only for the size of a refit buffer, which the engines' buckets have already."""
        return 0

    # Checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        checkpointing_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy the state and begin to write it into `step_N/policy`, which `weights_path` lies in.

        Optimizer and tokenizer are part of it; `finalize_async_save` waits for the files.

        Raises:
            UserError: a layout of folders that is not NeMo-RL's, or a checkpoint without its optimizer.
        """
        folder = Path(weights_path).parent
        if folder.name != POLICY:
            raise UserError(f"NeMo-RL's checkpoint has its weights in {weights_path}; wanted .../{POLICY}/weights")
        if optimizer_path is None:
            raise UserError("checkpointing.save_optimizer is false; the policy writes its optimizer always: set true")
        self._pending = (folder.parent, self._group.save_checkpoint(folder))

    def finalize_async_save(self) -> None:
        """Wait until every file is complete, and write `manifest.json` over all of them."""
        if self._pending is None:
            return
        (step_folder, finish), self._pending = self._pending, None
        known = {f"{POLICY}/{name}": digest for name, digest in (finish() if finish else {}).items()}
        final = step_folder.with_name(step_folder.name.removeprefix("tmp_"))
        for name, text in self._notes(final).items():
            (step_folder / name).write_text(text, encoding="utf-8")
        write_manifest(step_folder, known)

    def load_checkpoint(self, step_folder: Path) -> None:
        """Restore what a checkpoint holds of the policy."""
        self._group.load_checkpoint(Path(step_folder) / POLICY)

    def shutdown(self) -> bool:
        """End the processes."""
        self._group.shutdown()
        return True

    # Not supported ------------------------------------------------------------------------------------------------

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        """Raises `UserError`: nothing is distilled here."""
        raise UserError("get_topk_logits (distillation) is not supported: the policy computes log-probabilities only")

    def calibrate_qkv_fp8_scales(
        self,
        data: Mapping[str, Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """Raises `UserError`: DeepSeek-V4's cache has a scale for every token, none to calibrate."""
        raise UserError("calibrate_qkv_fp8_scales: DeepSeek-V4's cache has a scale for every token, none to calibrate")
