"""One rank of the training policy.

Shapes: B sequences, S tokens. Every row starts at position 0 and is padded on the right. With context parallelism a
row is cut into contiguous slices, one a rank; log-probabilities are gathered again, so that any loss sees whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import compute_rotary_frequencies
from nemo_rl_dsv4.model.fp8 import install_fp8
from nemo_rl_dsv4.model.qat import InstallReport, install_numerics, invalidate_rounded_weights
from nemo_rl_dsv4.model.quantized_weights import weight_roundings
from nemo_rl_dsv4.model.router_replay import RouterReplayer
from nemo_rl_dsv4.model.token_logprobs import AUTOMODEL_HEAD, BF16_HEAD, install_scoring_head, scoring
from nemo_rl_dsv4.numerics.profiles import RolloutProfile
from nemo_rl_dsv4.policy.host_shelf import HostShelf
from nemo_rl_dsv4.policy.layout import DOCUMENT_MULTIPLE, TokenLayout, packed_layout, plain_layout
from nemo_rl_dsv4.policy.master_weights import cast_float32_units, compute_in, quantize_in, to_master_weights
from nemo_rl_dsv4.policy.microbatch import MicroBatch, check_lengths, cut_rows, length_groups, split_into
from nemo_rl_dsv4.policy.optim import build_optimizer, build_scheduler
from nemo_rl_dsv4.policy.packing import Packing, pack_rows
from nemo_rl_dsv4.policy.parallel import Meshes, average_gradients, local_shard, parallelize, settle_gradients
from nemo_rl_dsv4.policy.training_state import TrainingStateWriter, load_training_state
from nemo_rl_dsv4.refit.sleep import release_workspaces
from nemo_rl_dsv4.refit.source_scales import SourceScales
from nemo_rl_dsv4.routes import MISSING_EXPERT, ROUTED_EXPERTS, RouterMode, as_signed

LossFn = Callable[..., tuple[torch.Tensor, dict[str, float]]]
Batch = dict[str, torch.Tensor]


class PolicyWorker:
    """Trains one rank's share of an AutoModel DeepSeek-V4.

    Args:
        model: the whole model, not yet sharded, with its weights or without (see `load`), in the dtype it computes in;
            its parameters become float32 (`policy.master_weights`).
        meshes: this rank's process meshes.
        load: fills the sharded model with weights and returns the scales they were stored under; None for a model that
            has its weights.
        fp8: multiply in FP8 where both operands are rounded (`model.fp8`); needs weights, inputs and experts on.
        profile: the rollout whose rounding to install.
        fake_quant: which site groups to round.
        alignment: switches beyond rounding that do not follow the profile.
        micro_batch_size: sequences of one forward and backward pass.
        logprob_batch_size: sequences of one scoring pass.
        optimizer: `{name, kwargs}` of the recipe.
        scheduler: the recipe's schedule list, or None.
        max_grad_norm: clipping threshold, None for no clipping.
        activation_checkpointing: recompute activations in the backward pass.
        keep_reference: keep a copy of the initial weights (this rank's shards) for `get_reference_logprobs`.
        logprob_chunk_size: positions whose logits over the vocabulary exist at once, in scoring and in training; None
            for all of a micro-batch.
        router: what to do with the experts that the rollout recorded (`routed_experts` of a batch).
        packing: put several rows into one sequence; micro-batches then follow its token limits instead of
            `micro_batch_size` and `logprob_batch_size`. None keeps one row a sequence.
        sequence_multiple: pad sequences to a multiple of this many tokens (and of what context parallelism needs).
        compute_dtype: dtype that sharded weights have in a product.
        cpu_offload: keep sharded weights, gradients and optimizer state in host memory.
        offload_optimizer_for_logprob: keep the optimizer state in host memory from a scoring pass to the next update.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        meshes: Meshes,
        *,
        profile: RolloutProfile,
        fake_quant: Mapping[str, bool],
        micro_batch_size: int,
        logprob_batch_size: int,
        optimizer: Mapping[str, Any],
        scheduler: list[Mapping[str, Any]] | None = None,
        max_grad_norm: float | None = 1.0,
        activation_checkpointing: bool = False,
        keep_reference: bool = False,
        logprob_chunk_size: int | None = None,
        router: RouterMode = RouterMode.OWN,
        load: Callable[[torch.nn.Module], SourceScales] | None = None,
        packing: Packing | None = None,
        sequence_multiple: int = 1,
        compute_dtype: torch.dtype = torch.float32,
        cpu_offload: bool = False,
        offload_optimizer_for_logprob: bool = False,
        fp8: bool = False,
        alignment: Mapping[str, bool] | None = None,
    ) -> None:
        self.meshes, self.packing = meshes, packing
        slices = DOCUMENT_MULTIPLE * meshes.sizes.cp if meshes.sizes.cp > 1 else 1
        self.sequence_multiple = math.lcm(sequence_multiple, slices)
        self.rounding: InstallReport = install_numerics(model, profile, fake_quant, alignment)
        if fp8:
            install_fp8(model, self.rounding)
        dtypes = to_master_weights(model)
        quantize_in(model, dtypes)
        sharded = meshes.world is not None
        if not sharded or meshes.sizes.ep == meshes.sizes.world:  # then no FSDP unit holds the experts
            compute_in(model, dtypes, experts_only=sharded)
        head = BF16_HEAD if self.rounding.aligned["logits_bf16"] == "on" else AUTOMODEL_HEAD
        self.head = install_scoring_head(model, chunk_size=logprob_chunk_size, numerics=head)
        self.router = None if router is RouterMode.OWN else RouterReplayer(model, replay=router is RouterMode.REPLAY)
        self.model = parallelize(
            model,
            meshes,
            activation_checkpointing=activation_checkpointing,
            compute_dtype=compute_dtype,
            cpu_offload=cpu_offload,
        )
        if sharded:
            cast_float32_units(self.model, dtypes)
        self.source_scales = SourceScales() if load is None else load(self.model)
        self.device = local_shard(next(self.model.parameters())).device
        if cpu_offload:
            # FSDP brings weights to the GPU for their use, but not buffers.
            self.device = torch.device("cuda", torch.cuda.current_device())
            for buffer in self.model.buffers():
                buffer.data = buffer.data.to(self.device)
        if self.device.type == "cuda":
            compute_rotary_frequencies(self.model, self.device)
        self.micro_batch_size, self.logprob_batch_size = micro_batch_size, logprob_batch_size
        self.max_grad_norm = max_grad_norm
        self.optimizer = build_optimizer(self.model.parameters(), optimizer["name"], optimizer["kwargs"])
        self.scheduler = build_scheduler(self.optimizer, scheduler)
        self.state_writer = TrainingStateWriter()
        self.offload_optimizer_for_logprob = offload_optimizer_for_logprob
        self._optimizer_shelf = HostShelf(self._optimizer_tensors, self.device, "optimizer states")
        self._model_shelf = HostShelf(self._model_tensors, self.device, "weights")
        self.reference = [local_shard(p).detach().clone() for p in self.model.parameters()] if keep_reference else None
        self.model.train()

    # Scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_logprobs(self, data: Batch) -> Batch:
        """Log-probabilities of the tokens of this rank's rows.

        Args:
            data: `input_ids` [B, S] and `input_lengths` [B]; with router replay, `routed_experts` [B, S, L, K] too.

        Returns:
            `logprobs`, float32 [B, S] on the CPU; position 0 and padding are 0.
        """
        self.wake()
        names = ["input_ids", "input_lengths"]
        if self.router is not None and self.router.replay:
            self.router.check(data)
            names.append(ROUTED_EXPERTS)
        return {"logprobs": self._logprobs({name: data[name] for name in names})}

    def _logprobs(self, needed: Batch) -> torch.Tensor:
        ids = needed["input_ids"]
        out = torch.zeros(ids.shape, dtype=torch.float32)
        if self.offload_optimizer_for_logprob:
            self._optimizer_shelf.to_host()
            release_workspaces(self.model)
        self.model.eval()
        for part in self._micro_batches(needed, training=False):
            logprobs = self._row_logprobs(part.data).cpu()
            width = min(part.length, ids.shape[1])
            valid = torch.arange(1, width) < needed["input_lengths"][part.rows].unsqueeze(1)
            out[part.rows, 1:width] = torch.where(valid, logprobs[:, : width - 1], 0.0)
        self.model.train()
        return out

    @torch.no_grad()
    def get_reference_logprobs(self, data: Batch) -> Batch:
        """`reference_logprobs` under the initial weights, which choose their experts; otherwise as `get_logprobs`.

        Raises:
            UserError: the worker was built without `keep_reference`.
        """
        if self.reference is None:
            raise UserError("no reference policy was kept; loss_fn.reference_policy_kl_penalty must not be 0")
        self.wake()
        with self._reference_weights():
            return {"reference_logprobs": self._logprobs({k: data[k] for k in ("input_ids", "input_lengths")})}

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        assert self.reference is not None
        self._drop_gathered()  # until then FSDP's modules have whole weights in place of their shards
        parameters = [local_shard(p) for p in self.model.parameters()]
        with torch.no_grad():
            current = [p.detach().clone() for p in parameters]
            for p, value in zip(parameters, self.reference, strict=True):
                p.copy_(value)
            invalidate_rounded_weights(self.model)
            try:
                yield
            finally:
                self._drop_gathered()
                for p, value in zip(parameters, current, strict=True):
                    p.copy_(value)
                invalidate_rounded_weights(self.model)

    def _micro_batches(self, data: Batch, *, training: bool) -> Iterator[MicroBatch]:
        """Micro-batches on this rank's device; as many of them on every rank."""
        lengths_B = check_lengths(data)
        if self.packing is not None:
            tokens = self.packing.train_tokens if training else self.packing.logprob_tokens
            groups = pack_rows(lengths_B, tokens, self.packing.algorithm)
        else:
            groups = length_groups(lengths_B, self.micro_batch_size if training else self.logprob_batch_size)
        if self.meshes.sizes.world > 1:
            count = torch.tensor(len(groups), device=self.device)
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
            groups = split_into(groups, int(count))
        multiple = self.sequence_multiple if self.packing is None else 1
        for part in cut_rows(data, groups, multiple=multiple):
            yield replace(part, data={name: value.to(self.device) for name, value in part.data.items()})

    def _row_logprobs(self, data: Batch) -> torch.Tensor:
        """Log-probability of token i + 1 at position i, float32 [b, S - 1], with gradient; 0 behind a row's end."""
        ids_bS, lengths_b = data["input_ids"], data["input_lengths"]
        if self.packing is None:
            layout = plain_layout(ids_bS, lengths_b, self.meshes)
        else:
            layout = packed_layout(ids_bS, lengths_b, self.meshes, multiple=self.sequence_multiple)
        targets_nT = layout.place(torch.roll(ids_bS, -1, dims=1))
        with scoring(self.model, targets_nT), self._routes(data, layout):
            logprobs_nT = self.model(**layout.model_inputs(ids_bS)).logits
        return layout.restore(logprobs_nT)[:, :-1]

    def _routes(self, data: Batch, layout: TokenLayout) -> AbstractContextManager[None]:
        """Replay (or compare) the rollout's experts in the model call inside, if this batch carries them."""
        if self.router is None or ROUTED_EXPERTS not in data:
            return nullcontext()
        routes_bSLK, ids_bS = as_signed(data[ROUTED_EXPERTS]), data["input_ids"]
        routed_bS = torch.arange(ids_bS.shape[1], device=ids_bS.device) < data["input_lengths"].unsqueeze(1) - 1
        return self.router.forward(
            layout.place(routes_bSLK, MISSING_EXPERT), layout.place(ids_bS), layout.place(routed_bS, False)
        )

    # Training -----------------------------------------------------------------------------------------------------

    def train(
        self, data: Batch, loss_fn: LossFn, *, global_valid_seqs: float, global_valid_tokens: float
    ) -> dict[str, Any]:
        """One optimizer step on this rank's rows of the global batch.

        Args:
            data: training batch under NeMo-RL's names, the rows of this data-parallel rank.
            loss_fn: `(next_token_logprobs [b, S - 1], data, global_valid_seqs=, global_valid_tokens=)` -> (loss,
                metrics), whose parts sum to the loss of the global batch.
            global_valid_seqs: sum of `sample_mask` over the global batch.
            global_valid_tokens: number of trained tokens of the global batch.

        Returns:
            `loss` (this rank's part), `grad_norm` (global, before clipping), `lr`, `all_mb_metrics`: metrics of each
            micro-batch, and `router` (this rank's tally) where routes are replayed or compared.

        Raises:
            UserError: `routed_experts` are wanted and missing or wrong.
            FloatingPointError: the gradient norm is not finite; no weight has been changed.
        """
        self.wake()
        if self.router is not None:
            self.router.check(data)
            self.router.take_tally()
        self.optimizer.zero_grad(set_to_none=True)
        lr = self.optimizer.param_groups[0]["lr"]
        losses, metrics = [], []
        for part in self._micro_batches(data, training=True):
            logprobs = self._row_logprobs(part.data)
            loss, part_metrics = loss_fn(
                logprobs, part.data, global_valid_seqs=global_valid_seqs, global_valid_tokens=global_valid_tokens
            )
            # Sharded parameters average their gradients over dp x cp ranks, and gathering rows already multiplied them
            # by cp.
            (loss * self.meshes.sizes.dp).backward()
            losses.append(float(loss.detach()))
            metrics.append(part_metrics)
        if self.meshes.sizes.world > 1 and self.meshes.sizes.replicated:
            average_gradients(self.model.parameters())
        grad_norm = self._clip_gradients()
        if not torch.isfinite(torch.tensor(grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"gradient norm is {grad_norm}; the step was not taken and weights are unchanged")
        settle_gradients(self.model.parameters(), world=self.meshes.sizes.world)
        self._optimizer_shelf.to_device()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        invalidate_rounded_weights(self.model)
        result = {"loss": sum(losses), "grad_norm": grad_norm, "lr": lr, "all_mb_metrics": metrics}
        return result if self.router is None else result | {"router": self.router.take_tally()}

    def _clip_gradients(self) -> float:
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        sizes = self.meshes.sizes
        norm = scale_grads_and_clip_grad_norm(
            limit,
            [self.model],
            device_mesh=self.meshes.world,
            moe_mesh=self.meshes.moe,
            ep_axis_name="ep" if self.meshes.moe is not None else None,
            dp_group_size=sizes.dp * sizes.cp,
            foreach=False,
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    # Memory -------------------------------------------------------------------------------------------------------

    def sleep_optimizer(self) -> int:
        """Move the optimizer's state to host memory, until the next update or checkpoint; returns the bytes moved."""
        return self._optimizer_shelf.to_host()

    def sleep(self) -> int:
        """Move all that this rank keeps between calls to host memory; returns the bytes that left the device.

        Optimizer states, weights, the reference policy, codes and scales of quantized weights; what FSDP gathered is
        dropped. The methods of this class bring back what they need; others call `wake` before they touch the model.
        """
        self._drop_gathered()
        release_workspaces(self.model)
        return self._optimizer_shelf.to_host() + self._model_shelf.to_host()

    def wake(self, *, optimizer: bool = False) -> None:
        """Bring the weights, and the optimizer's state if asked, back to the device; nothing if they are there."""
        self._model_shelf.to_device()
        if optimizer:
            self._optimizer_shelf.to_device()

    def _drop_gathered(self) -> None:
        """Leave FSDP with shards alone.

        After a pass without gradients it keeps what it gathered for the next one, which would not see weights that were
        changed in between.
        """
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _model_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        yield from self.model.buffers()
        yield from self.reference or ()
        for *_, rounding in weight_roundings(self.model):
            yield from rounding.tensors()

    # Weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under AutoModel's names, gathered over ranks. Collective: every rank calls it."""
        self.wake()
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in self.model.state_dict().items()
        }

    def save_checkpoint(self, folder: str) -> None:
        """Write model, optimizer and schedule; see :mod:`nemo_rl_dsv4.policy.training_state`. Collective."""
        self.start_checkpoint(folder)
        self.state_writer.wait()

    def start_checkpoint(self, folder: str) -> None:
        """Copy the state and begin to write it; `state_writer` tells when it is done. Collective."""
        self.wake(optimizer=True)
        self.state_writer.start(self.model, self.optimizer, self.scheduler, folder)

    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` wrote, at the same or another parallel size. Collective.

        Raises:
            UserError: the folder is missing, damaged, or of another model.
        """
        self.wake(optimizer=True)
        self._drop_gathered()
        load_training_state(self.model, self.optimizer, self.scheduler, folder)
        invalidate_rounded_weights(self.model)
