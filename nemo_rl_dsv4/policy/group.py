"""The training policy as a group of Ray actors, one a rank, behind the trainer's `Policy` protocol.

Invariants:
- Rows of a batch go to data-parallel ranks in order and come back in order.
- Every rank makes the same calls in the same order: each method below is one call on every rank.
- Weights leave only through the refit exporter, on rank 0 or on the ranks that share a GPU with an engine worker, after
  all ranks took part in gathering them.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.sent_weights import SentWeights
from nemo_rl_dsv4.routes import ROUTED_EXPERTS, RouterMode, RouterTally
from nemo_rl_dsv4.utils.ray_calls import CPU_WORKER_OPTIONS, GPU_WORKER_OPTIONS, get, kill

if TYPE_CHECKING:
    from nemo_rl_dsv4.policy.spec import PolicySpec
    from nemo_rl_dsv4.refit.wire import Shipment

SECONDS_BETWEEN_POLLS = 0.1
"""How often a rank is asked whether its checkpoint files are complete."""


@ray.remote
class PolicyActor:
    """One rank's process."""

    def __init__(self, rank: int, world: int, init_method: str, device: str = "cpu") -> None:
        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows an actor its own GPU only
        else:
            torch.set_num_threads(1)
        if world > 1:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
        self.rank = rank

    def node(self) -> str:
        """Ray's id of the node that this rank runs on."""
        return ray.get_runtime_context().get_node_id()

    def build(self, spec: PolicySpec, local_world: int, board: Any = None) -> str:
        """Build this rank (again) and return what it rounds.

        Args:
            spec: its settings.
            local_world: ranks that share its node.
            board: a `LoadBoard` that hears how far the loading is.
        """
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world)  # as torchrun sets it; dispatchers ask for it
        from nemo_rl_dsv4.policy.load_board import reporter
        from nemo_rl_dsv4.policy.spec import build_worker
        from nemo_rl_dsv4.policy.weight_sender import WeightSender

        self.spec = spec
        self.worker = build_worker(spec, None if board is None else reporter(board))
        self.sender = WeightSender(torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu"))
        self.release_memory()  # of loading, and of the model that was here before
        return self.worker.rounding.summary()

    def release_memory(self) -> None:
        """Give GPU memory that no tensor uses back to the device, where a rollout engine may need it.

        PyTorch keeps what a pass has freed for the next one, and other processes cannot have it meanwhile.
        """
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()

    def install_report(self) -> dict[str, Any]:
        """What was installed on the model, module by module, as JSON values."""
        return self.worker.rounding.to_dict()

    def get_logprobs(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `PolicyWorker.get_logprobs`."""
        return self.worker.get_logprobs(data)

    def get_reference_logprobs(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `PolicyWorker.get_reference_logprobs`."""
        return self.worker.get_reference_logprobs(data)

    def train(self, data: dict[str, torch.Tensor], loss_fn: Any, seqs: float, tokens: float) -> dict[str, Any]:
        """See `PolicyWorker.train`."""
        return self.worker.train(data, loss_fn, global_valid_seqs=seqs, global_valid_tokens=tokens)

    def export(self, profile: str) -> Shipment | None:
        """Quantize on the ranks that hold the weights; rank 0 returns all of them with their checksum."""
        from nemo_rl_dsv4.refit.report import StreamTally
        from nemo_rl_dsv4.refit.wire import Shipment, to_wire

        stream = self._export_stream(profile)
        if stream is None:
            return None
        tally = StreamTally()
        tensors = to_wire(tally.watch(stream))
        return Shipment(tensors, tally.report().checksum)

    def export_to_folder(self, profile: str, folder: str, capacity_bytes: int, version: int) -> int | None:
        """Quantize as `export` does; rank 0 writes buckets into a folder and returns their number."""
        from nemo_rl_dsv4.refit.transport.file import write_folder

        stream = self._export_stream(profile)
        if stream is None:
            return None
        through = torch.device("cuda", 0) if self.spec.device == "cuda" else None
        return write_folder(stream, Path(folder), capacity_bytes=capacity_bytes, version=version, through=through)

    def gpu_name(self) -> str:
        """What every process of this host calls this rank's GPU."""
        return self.sender.gpu

    def open_sender(self, transport: str, receivers: int, capacity_bytes: int) -> tuple[str, str, str | int] | None:
        """See `WeightSender.open`."""
        return self.sender.open(transport, receivers, capacity_bytes)

    def send_weights(self, profile: str, version: int, transport: str) -> dict[str, Any] | None:
        """See `WeightSender.send`; over CUDA IPC and by broadcast any rank may send, else rank 0 does."""
        every_rank = transport != "shared_memory"
        return self.sender.send(lambda: self._export_stream(profile, every_rank=every_rank), version, transport)

    def _export_stream(self, profile: str, *, every_rank: bool = False) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What rank 0 sends, or every rank; else other ranks take part in every gather and get None."""
        from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, stored_codes
        from nemo_rl_dsv4.refit.export import export_weights

        if self.rank != 0 and self.spec.sizes.replicated and not every_rank:
            return None
        refresh_quantized(self.worker.model)
        stream = export_weights(
            self.worker.model.state_dict(),
            profile,
            unquantized=torch.bfloat16 if self.spec.precision == "bfloat16" else torch.float32,
            source_scales=self.worker.source_scales,
            stored=stored_codes(self.worker.model),
        )
        if self.rank == 0 or every_rank:
            return stream
        for _ in stream:
            pass
        return None

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Gather whole tensors; rank 0 returns them."""
        state = self.worker.full_state_dict()
        return state if self.rank == 0 else None

    def start_checkpoint(self, folder: str) -> None:
        """See `PolicyWorker.start_checkpoint`."""
        self.worker.start_checkpoint(folder)

    def finish_checkpoint(self) -> dict[str, str] | None:
        """SHA-256 of this rank's files by name, or None while they are being written. Does not wait."""
        writer = self.worker.state_writer
        return writer.wait() if writer.done() else None

    def load_checkpoint(self, folder: str) -> None:
        """See `PolicyWorker.load_checkpoint`."""
        self.worker.load_checkpoint(folder)


class PolicyGroup:
    """Drives a fixed number of ranks.

    The processes start at once and import their libraries while the caller goes on; `build` gives them a model.

    Args:
        world: number of ranks.
        device: `cpu`, or `cuda` for a GPU a rank; `PolicySpec.device` has to say the same.
    """

    def __init__(self, world: int, *, device: str = "cpu") -> None:
        self.world, self.device, self.version, self.updates = world, device, 0, 0
        self._stopped = threading.Event()
        self._rendezvous = tempfile.TemporaryDirectory(prefix="nemo-rl-dsv4-")
        init_method = f"file://{self._rendezvous.name}/rendezvous"
        self.actors = [
            PolicyActor.options(**(CPU_WORKER_OPTIONS if device == "cpu" else GPU_WORKER_OPTIONS)).remote(
                rank, world, init_method, device
            )
            for rank in range(world)
        ]

    def build(
        self, spec: PolicySpec, *, global_batch_size: int, on_load: Callable[[int, int], None] | None = None
    ) -> str:
        """Build the model on every rank, replacing what was there; return the rounding summary.

        Args:
            spec: settings of every rank; its sizes fit this group's number of ranks.
            global_batch_size: sequences of one optimizer step; a rollout batch may hold several.
            on_load: hears, now and then, (bytes read, bytes to read) of rank 0's part of a checkpoint.

        Raises:
            UserError: what was wrong with the checkpoint or the settings, as the rank found it.
        """
        if spec.sizes.world != self.world:
            raise UserError(f"the settings are for {spec.sizes.world} ranks; this group has {self.world}")
        if spec.device != self.device:
            raise UserError(f"the settings are for device {spec.device}; this group's processes have {self.device}")
        self.spec, self.global_batch_size = spec, global_batch_size
        self.updates += 1
        nodes = get([actor.node.remote() for actor in self.actors])
        places = list(zip(self.actors, (nodes.count(node) for node in nodes), strict=True))
        if on_load is None:
            return get([actor.build.remote(spec, local) for actor, local in places])[0]
        from nemo_rl_dsv4.policy.load_board import watched

        with watched(on_load) as (board, watch):
            refs = [
                actor.build.remote(spec, local, board if rank == 0 else None)
                for rank, (actor, local) in enumerate(places)
            ]
            watch(refs)
            return get(refs)[0]

    def install_report(self) -> dict[str, Any]:
        """What was installed on the model, module by module, as JSON values; the same on every rank."""
        return get([self.actors[0].install_report.remote()])[0]

    def _by_data_rank(self, data: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """One slice of the rows for each rank; ranks of one context-parallel group get the same slice."""
        rows, dp, cp = len(data["input_ids"]), self.spec.sizes.dp, self.spec.sizes.cp
        if rows % dp:
            raise UserError(f"a batch of {rows} sequences does not divide over {dp} data-parallel ranks")
        share = rows // dp
        slices = [{k: v[i * share : (i + 1) * share] for k, v in data.items()} for i in range(dp)]
        return [slices[rank // cp] for rank in range(self.spec.sizes.world)]

    def _score(self, method: str, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = len(data["input_ids"])
        names = ["input_ids", "input_lengths"]
        if method == "get_logprobs" and self.spec.router is RouterMode.REPLAY:
            names.append(ROUTED_EXPERTS)
        padded = _pad_rows({k: data[k] for k in names if k in data}, self.spec.sizes.dp)
        refs = [
            getattr(actor, method).remote(part)
            for actor, part in zip(self.actors, self._by_data_rank(padded), strict=True)
        ]
        parts = get(refs)[:: self.spec.sizes.cp]
        return {key: torch.cat([part[key] for part in parts])[:rows] for key in parts[0]}

    def get_logprobs(self, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`logprobs` float32 [B, S] under the current weights; position 0 and padding are 0.

        With router replay, `routed_experts` of `data` are replayed.
        """
        return self._score("get_logprobs", data)

    def get_reference_policy_logprobs(self, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`reference_logprobs` float32 [B, S] under the initial weights, which choose their experts themselves."""
        return self._score("get_reference_logprobs", data)

    def train(self, data: Mapping[str, torch.Tensor], loss_fn: Any) -> dict[str, Any]:
        """Update on `data` in global batches of `global_batch_size`, one optimizer step each.

        Returns:
            `loss` and `grad_norm`: one value an update; `lr` of the first; `all_mb_metrics`: name -> list over updates,
            ranks and micro-batches; `router`, if the policy replays or compares routes: the tally of all ranks.

        Raises:
            UserError: the batch does not divide into global batches or over ranks.
        """
        rows = len(data["input_ids"])
        if rows % self.global_batch_size:
            raise UserError(
                f"{rows} sequences do not divide into global batches of {self.global_batch_size}; "
                "change policy.train_global_batch_size"
            )
        self.updates += 1
        losses, norms, learning_rates, metrics, routers = [], [], [], [], []
        for start in range(0, rows, self.global_batch_size):
            part = {k: v[start : start + self.global_batch_size] for k, v in data.items()}
            seqs, tokens = _count_trained(part)
            refs = [
                actor.train.remote(share, loss_fn, seqs, tokens)
                for actor, share in zip(self.actors, self._by_data_rank(part), strict=True)
            ]
            of_all_ranks = get(refs)
            routers += [out["router"] for out in of_all_ranks if "router" in out]
            outputs = of_all_ranks[:: self.spec.sizes.cp]
            losses.append(sum(out["loss"] for out in outputs))
            norms.append(outputs[0]["grad_norm"])
            learning_rates.append(outputs[0]["lr"])
            metrics += [mb for out in outputs for mb in out["all_mb_metrics"]]
        result = {
            "loss": torch.tensor(losses),
            "grad_norm": torch.tensor(norms),
            "lr": learning_rates[0],
            "all_mb_metrics": _collect(metrics, updates=rows // self.global_batch_size),
        }
        return result | {"router": RouterTally.total(routers)} if routers else result

    def export_to(self, generation: Any) -> dict[str, float]:
        """Send the current weights to the rollout engine; returns what to log under `refit/`."""
        started = time.perf_counter()
        self.version += 1
        profile = self.spec.profile
        if getattr(generation, "transport", "folder") != "folder":
            report = generation.update_weights(SentWeights(self, generation.transport, generation.bucket_bytes))
        elif hasattr(generation, "bucket_folder"):
            folder = str(generation.bucket_folder(self.version))
            capacity = generation.bucket_bytes
            get([actor.export_to_folder.remote(profile, folder, capacity, self.version) for actor in self.actors])
            report = generation.update_weights(folder)
        else:
            refs = [actor.export.remote(profile) for actor in self.actors]
            get(refs[1:])
            report = generation.update_weights(refs[0])
        return {**report, "seconds": time.perf_counter() - started}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under AutoModel's names."""
        return get([actor.full_state_dict.remote() for actor in self.actors])[0]

    def prepare_for_training(self) -> None:
        """Nothing to wake: weights and optimizer stay where they are."""

    def finish_training(self) -> None:
        """Leave the GPUs' unused memory to the rollout engines; on a CPU there is nothing to do."""
        if self.device == "cuda":
            get([actor.release_memory.remote() for actor in self.actors])

    def save_checkpoint(self, folder: Path) -> Callable[[], dict[str, str]]:
        """Copy weights, optimizer, schedule and random state on every rank, and begin to write them into `folder`.

        Config and tokenizer of the checkpoint that the run started from go beside them (`policy.export_source`).

        Returns:
            A function that waits until every rank's files are complete, and returns their SHA-256 by name. Other calls
            may be made meanwhile, from other threads too: ranks are asked, never held up.
        """
        from nemo_rl_dsv4.policy.export_source import write_export_source

        get([actor.start_checkpoint.remote(str(Path(folder).resolve())) for actor in self.actors])
        write_export_source(folder, self.spec.export_source, self.spec.hf_config or {}, self.spec.config_overrides)

        def finish() -> dict[str, str]:
            digests: dict[str, str] = {}
            for actor in self.actors:
                while not self._stopped.is_set():
                    found = get([actor.finish_checkpoint.remote()])[0]
                    if found is not None:
                        digests |= found
                        break
                    self._stopped.wait(SECONDS_BETWEEN_POLLS)
                else:
                    raise UserError(f"{folder} was not complete when the run was stopped; it is removed")
            return digests

        return finish

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote."""
        self.updates += 1
        get([actor.load_checkpoint.remote(str(Path(folder).resolve())) for actor in self.actors])

    def abandon_checkpoint(self) -> None:
        """Give up a checkpoint that is being written: whoever waits for it gets a `UserError`. Ends checkpointing."""
        self._stopped.set()

    def shutdown(self) -> None:
        """End the processes and remove the rendezvous file."""
        self.abandon_checkpoint()
        kill(self.actors)
        self._rendezvous.cleanup()


def _pad_rows(data: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Repeat the last row until the number of rows is a multiple of `multiple`."""
    missing = -len(data["input_ids"]) % multiple
    return data if missing == 0 else {k: torch.cat([v, v[-1:].expand(missing, *v.shape[1:])]) for k, v in data.items()}


def _count_trained(data: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Sequences and predicted tokens that count in a global batch; the first token of a row is never predicted."""
    tokens = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    return float(data["sample_mask"].sum()), float(tokens.sum())


def _collect(metrics: list[dict[str, float]], updates: int) -> dict[str, list[float]]:
    """[{name: value}] of micro-batches to {name: [value]}.

    The loop sums over the list. With several updates a step the values are divided first, so that the sum is the mean
    over updates; smallest and largest values are not.
    """
    collected: dict[str, list[float]] = {}
    for part in metrics:
        for name, value in part.items():
            extreme = name.endswith(("_min", "_max"))
            collected.setdefault(name, []).append(value if extreme else value / updates)
    return collected
