"""Which training ranks send a refit to which engine workers of their host, and through what memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

Transport = Literal["auto", "cuda_ipc", "shared_memory", "broadcast", "folder"]
CPU = "cpu"
"""What `gpu_name` calls a process without a GPU."""


@dataclass(frozen=True)
class Delivery:
    """One refit's way from ranks to workers.

    Attributes:
        transport: GPU memory that both map, memory of the host, or NCCL.
        served: for each worker, the rank that sends to it.
        ranks: number of training ranks; one without workers only takes part in the export.
    """

    transport: Literal["cuda_ipc", "shared_memory", "broadcast"]
    served: tuple[int, ...]
    ranks: int

    @property
    def receivers(self) -> tuple[int, ...]:
        """For each rank, how many workers it sends to."""
        return tuple(self.served.count(rank) for rank in range(self.ranks))

    def place(self, worker: int) -> tuple[int, int]:
        """A worker's rank in its sender's channel, from 1, and the channel's size."""
        sender = self.served[worker]
        return 1 + self.served[:worker].count(sender), 1 + self.served.count(sender)


def plan_delivery(wanted: Transport, rank_gpus: Sequence[str], worker_gpus: Sequence[str]) -> Delivery:
    """Choose how weights reach the workers.

    Over CUDA IPC each worker gets the whole stream from the first rank on its own GPU; through host memory rank 0
    serves all of them. By broadcast a rank that shares its GPU with no worker serves all; if there is none, each worker
    is served by the rank behind the one on its GPU, since NCCL has no two ends on one GPU.

    Args:
        wanted: `auto`, `cuda_ipc`, `shared_memory` or `broadcast`.
        rank_gpus: `gpu_name` of every rank's device.
        worker_gpus: of every worker's, of all engines that are refitted together.

    Raises:
        UserError: `cuda_ipc` is wanted and a worker has no rank on its GPU; `broadcast`, and two ends would be on one.
    """
    if wanted == "broadcast":
        return Delivery("broadcast", _broadcasters(rank_gpus, worker_gpus), len(rank_gpus))
    apart = sorted({gpu for gpu in worker_gpus if gpu == CPU or gpu not in rank_gpus})
    if not apart and wanted in ("auto", "cuda_ipc"):
        return Delivery("cuda_ipc", tuple(rank_gpus.index(gpu) for gpu in worker_gpus), len(rank_gpus))
    if wanted == "cuda_ipc":
        raise UserError(
            f"policy.dsv4.refit.transport is cuda_ipc, but no training rank is on GPU {apart[0]} of an engine worker "
            f"(ranks are on {', '.join(rank_gpus)}); set it to shared_memory or auto"
        )
    if wanted == "auto":
        log.info("refit through shared memory: engine workers on %s share no GPU with a training rank", apart)
    return Delivery("shared_memory", (0,) * len(worker_gpus), len(rank_gpus))


def _broadcasters(rank_gpus: Sequence[str], worker_gpus: Sequence[str]) -> tuple[int, ...]:
    key = "policy.dsv4.refit.transport is broadcast, but"
    if CPU in worker_gpus or len(set(worker_gpus)) < len(worker_gpus):
        raise UserError(f"{key} engine workers are on {', '.join(worker_gpus)}; wanted each on a GPU of its own")
    alone = [rank for rank, gpu in enumerate(rank_gpus) if gpu not in worker_gpus]
    if alone:
        return (alone[0],) * len(worker_gpus)
    served = tuple((rank_gpus.index(gpu) + 1) % len(rank_gpus) for gpu in worker_gpus)
    for worker, rank in enumerate(served):
        if rank_gpus[rank] == worker_gpus[worker]:
            raise UserError(
                f"{key} the one training rank and an engine worker are both on GPU {rank_gpus[rank]}, and NCCL has no "
                "two ends on one GPU; set it to auto"
            )
    return served
