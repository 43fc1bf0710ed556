"""Training ranks of `vllm_refit.py`: each holds its shards of random weights and sends them when told to.

Matrices are sharded over rows (FSDP) and expert stacks over experts (EP), both over all ranks, as AutoModel shards them
with data and expert parallelism of the same size. One process a GPU; an engine's workers sit on the same GPUs.

`ipc`: each rank serves the worker on its own GPU. `broadcast`: NCCL has no two ends on one GPU, so each rank serves the
worker on the next one. All ranks commit together or none does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastSender
from nemo_rl_dsv4.refit.transport.channel import listen, open_channel
from nemo_rl_dsv4.refit.transport.file import write_folder
from nemo_rl_dsv4.refit.transport.protocol import run_dry
from nemo_rl_dsv4.refit.transport.shared import SharedSender, gpu_name
from nemo_rl_dsv4.refit.worker_calls import call_method, results

State = dict[str, torch.Tensor]
PROFILE = "vllm-hopper"


def sender_of(worker: int, ranks: int, transport: str) -> int:
    """The training rank that serves an engine's worker."""
    return worker % ranks if transport == "ipc" else (worker + 1) % ranks


class Rank:
    """One training rank, in its process."""

    def __init__(
        self, rank: int, world: int, device: torch.device, weights: Callable[[int], State], bucket: int
    ) -> None:
        self.rank, self.world, self.device, self.weights, self.bucket = rank, world, device, weights, bucket
        self.senders: dict[str, Any] = {}
        self.mesh = init_device_mesh(device.type, (world,))
        self.timeout = 60.0

    def load(self, version: int, spoiled: bool = False) -> float:
        """Become a version; return the GiB of this rank's shards. `spoiled` puts a NaN into a late matrix of rank 0."""
        self.state = {}
        for name, value in self.weights(version).items():
            if value.is_floating_point():
                value = distribute_tensor(value, self.mesh, [Shard(0)], src_data_rank=None)
            self.state[name] = value
        if spoiled and self.rank == 0:
            self.state["lm_head.weight"].to_local()[0, 0] = float("nan")
        local = [t.to_local() if hasattr(t, "to_local") else t for t in self.state.values()]
        return sum(t.numel() * t.element_size() for t in local) / 2**30

    def offer(self, transport: str, workers: int) -> tuple[Any, ...]:
        """Begin to serve workers; what they have to know of this rank."""
        mine = [worker for worker in range(workers) if sender_of(worker, self.world, transport) == self.rank]
        if transport == "ipc":
            on = self.device if self.device.type == "cuda" else None
            if mine:
                self.senders[transport] = SharedSender(capacity_bytes=self.bucket, device=on, timeout=self.timeout)
                address = self.senders[transport].address
                return gpu_name(self.device), address.socket, address.key
            return ()
        self.store = listen(timeout=self.timeout)
        return "127.0.0.1", self.store.port, 1 + len(mine)

    def connect(self, size: int) -> None:
        """Open the broadcast channel that was offered; returns when the workers have joined."""
        if size > 1:
            channel = open_channel(self.store, rank=0, size=size, device=self.device, timeout=self.timeout)
            self.senders["broadcast"] = BroadcastSender(channel, capacity_bytes=self.bucket)

    def send(self, transport: str, version: int, folder: str = "") -> dict[str, Any]:
        """Export and send; report of this rank, with the time of the export alone where nobody is served."""
        stream, started = export_weights(self.state, PROFILE), time.perf_counter()
        if transport == "folder" and self.rank == 0:
            buckets = write_folder(stream, Path(folder), capacity_bytes=self.bucket, version=version)
            return {"buckets": buckets, "seconds": time.perf_counter() - started}
        if transport == "folder" or transport not in self.senders:
            run_dry(stream)
            if transport != "folder":
                self.vote(True)
            return {"seconds": time.perf_counter() - started}
        report = self.senders[transport].send(stream, version=version, vote=self.vote)
        return {"seconds": time.perf_counter() - started, "bytes": report.bytes, "checksum": report.checksum}

    def vote(self, good: bool) -> bool:
        """Whether all ranks say so."""
        flag = torch.tensor(int(good))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def serve(own: Rank, link: Connection) -> None:
    """Answer calls of a rank's methods that come over `link`, until the last."""
    while True:
        method, args, kwargs = link.recv()
        if method == "end":
            return
        link.send(call_method(own, method, args, kwargs))


def run_process(
    rank: int, world: int, device: str, rendezvous: str, link: Connection, weights: Callable[[int], State], bucket: int
) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=rendezvous, rank=rank, world_size=world
    )
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    serve(Rank(rank, world, where, weights, bucket), link)
    dist.destroy_process_group()


def processes(
    world: int, device: str, weights: Callable[[int], State], bucket: int
) -> Callable[[int, Connection], BaseProcess]:
    """Launches ranks for `Ranks`, each in a process."""
    context = mp.get_context("spawn")
    rendezvous = f"file://{tempfile.mkdtemp(prefix='dsv4-ranks-')}/rendezvous"

    def launch(rank: int, link: Connection) -> BaseProcess:
        arguments = (rank, world, device, rendezvous, link, weights, bucket)
        process = context.Process(target=run_process, args=arguments, daemon=True)
        process.start()
        return process

    return launch


class Ranks:
    """The training ranks, seen from the process that drives the engine.

    Args:
        world: how many.
        launch: starts one, given its number and its end of a pipe, as a process or a thread that `serve`s.
    """

    def __init__(self, world: int, launch: Callable[[int, Connection], Any]) -> None:
        pipes = [mp.Pipe() for _ in range(world)]
        self.links = [here for here, _ in pipes]
        self.running = [launch(rank, there) for rank, (_, there) in enumerate(pipes)]

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every rank without waiting."""
        for link in self.links:
            link.send((method, args, kwargs))

    def finish(self, method: str, timeout: float = 120.0) -> list[Any]:
        """What every rank returned.

        Raises:
            UserError: a rank raised one, or died.
        """
        answers = []
        for rank, link in enumerate(self.links):
            try:
                if not link.poll(timeout):
                    raise UserError(f"training rank {rank}: nothing from {method} for {timeout:g} s")
                answers.append(link.recv())
            except EOFError:
                raise UserError(f"training rank {rank} died in {method}") from None
        return results(method, answers)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank and wait."""
        self.start(method, *args, **kwargs)
        return self.finish(method)

    def end(self) -> None:
        """End them."""
        self.start("end")
        for one in self.running:
            one.join(10)
            if one.is_alive() and hasattr(one, "terminate"):
                one.terminate()
