"""One rank of the training policy as a Ray actor: its place, its process group, and the worker's calls."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from nemo_rl_dsv4.policy.rendezvous import join_ranks
from nemo_rl_dsv4.utils.hosts import Place

if TYPE_CHECKING:
    from nemo_rl_dsv4.policy.spec import PolicySpec
    from nemo_rl_dsv4.refit.delivery import Seat
    from nemo_rl_dsv4.refit.wire import Shipment


@ray.remote
class PolicyActor:
    """One rank's process."""

    def __init__(self, device: str = "cpu", sees_host: bool = False) -> None:
        if device == "cuda" and not sees_host:
            torch.cuda.set_device(0)  # Ray shows an actor its own GPU only
        elif device == "cpu":
            torch.set_num_threads(1)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.rank, self.address = 0, ""
        self._store: Any = None

    def place(self) -> Place:
        """Where this process runs."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"] if self.device.type == "cuda" else []
        variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
        return Place(context.get_node_id(), tuple(gpus), variable)

    def open_store(self, address: str) -> int:
        """Rank 0's: start the store through which ranks meet; returns its port on `address`, this host's."""
        from nemo_rl_dsv4.refit.transport.channel import listen

        self._store = listen(address)
        return self._store.port

    def see_host(self, local_rank: int, gpus: Sequence[str], variable: str) -> None:
        """See the GPUs of all ranks of this host, as torchrun's processes do, and use one of them.

        Before anything else on a GPU. UCCL-EP takes a process's number of its GPU for its number on the host.

        Args:
            local_rank: this rank's number on its host, and its GPU's among `gpus`.
            gpus: names of the GPUs of the host's ranks, in rank order.
            variable: the environment variable that shows them.
        """
        os.environ |= {variable: ",".join(gpus), "LOCAL_RANK": str(local_rank)}
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)

    def join(self, rank: int, world: int, local_world: int, address: str, store: tuple[str, int] | None) -> None:
        """Become a rank of the policy; returns when all ranks have.

        `LOCAL_WORLD_SIZE` is set as torchrun does, since dispatchers read from it who shares a host. `LOCAL_RANK` is
        not, unless by `see_host`: libraries take it for the number of a GPU among those that the process sees.

        Args:
            rank: this process's.
            world: number of ranks.
            local_world: ranks that share its host.
            address: of its host.
            store: host and port of rank 0's store; None in a world of one.

        Raises:
            UserError: see `join_ranks`.
        """
        self.rank, self.address = rank, address
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world)
        if store is not None:
            own = store if self._store is None else self._store
            join_ranks(own, rank=rank, world=world, device=self.device.type, address=address)

    def profile(self) -> str:
        """Name of the rollout profile of this rank's GPU."""
        from nemo_rl_dsv4.numerics.devices import profile_of_device

        return profile_of_device().name

    def build(self, spec: PolicySpec, board: Any = None) -> str:
        """Build this rank (again) and return what it rounds.

        Args:
            spec: its settings.
            board: a `LoadBoard` that hears how far the loading is.
        """
        from nemo_rl_dsv4.policy.load_board import reporter
        from nemo_rl_dsv4.policy.spec import build_worker
        from nemo_rl_dsv4.policy.weight_sender import WeightSender

        self.spec = spec
        self.worker = build_worker(spec, None if board is None else reporter(board))
        self.sender = WeightSender(self.device, self.address)
        self.release_memory()  # of loading, and of the model that was here before
        return self.worker.rounding.summary()

    def release_memory(self) -> None:
        """Give GPU memory that no tensor uses back to the device, where a rollout engine may need it.

        PyTorch keeps what a pass has freed for the next one, and other processes cannot have it meanwhile.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, optimizer_only: bool) -> None:
        """See `PolicyWorker.sleep`, or `sleep_optimizer`; the memory goes back to the device."""
        if optimizer_only:
            self.worker.sleep_optimizer()
        else:
            self.worker.sleep()
        self.release_memory()

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

        stream = self._export_stream(profile, wanted=self.rank == 0)
        if stream is None:
            return None
        tally = StreamTally()
        tensors = to_wire(tally.watch(stream))
        return Shipment(tensors, tally.report().checksum)

    def export_to_folder(self, profile: str, folder: str, capacity_bytes: int, version: int) -> int | None:
        """Quantize as `export` does; rank 0 writes buckets into a folder and returns their number."""
        from nemo_rl_dsv4.refit.transport.file import write_folder

        stream = self._export_stream(profile, wanted=self.rank == 0)
        if stream is None:
            return None
        through = self.device if self.device.type == "cuda" else None
        return write_folder(stream, Path(folder), capacity_bytes=capacity_bytes, version=version, through=through)

    def seat(self) -> Seat:
        """This rank's end of a refit: Ray's id of its node, and its GPU's name there."""
        from nemo_rl_dsv4.refit.delivery import Seat

        return Seat(ray.get_runtime_context().get_node_id(), self.sender.gpu)

    def open_sender(self, transport: str, receivers: int, capacity_bytes: int) -> tuple[str, str | int] | None:
        """See `WeightSender.open`."""
        return self.sender.open(transport, receivers, capacity_bytes)

    def send_weights(self, profile: str, version: int) -> dict[str, Any] | None:
        """See `WeightSender.send`; a rank without receivers takes part in what the others gather."""
        return self.sender.send(lambda: self._export_stream(profile, wanted=self.sender.receivers > 0), version)

    def _export_stream(self, profile: str, *, wanted: bool) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What this rank sends; where it is not wanted, the rank takes part in every gather and returns None."""
        from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, stored_codes
        from nemo_rl_dsv4.refit.export import export_weights

        if not wanted and self.spec.sizes.replicated:
            return None
        self.worker.wake()
        refresh_quantized(self.worker.model)
        stream = export_weights(
            self.worker.model.state_dict(),
            profile,
            unquantized=torch.bfloat16 if self.spec.precision == "bfloat16" else torch.float32,
            source_scales=self.worker.source_scales,
            stored=stored_codes(self.worker.model),
        )
        if wanted:
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
