"""Which training ranks send a refit to which engine workers of their host, and through what memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

Transport = Literal["auto", "cuda_ipc", "shared_memory", "folder"]
CPU = "cpu"
"""What `gpu_name` calls a process without a GPU."""


@dataclass(frozen=True)
class Delivery:
    """One refit's way from ranks to workers.

    Attributes:
        transport: GPU memory that both map, or memory of the host.
        receivers: for each rank, how many workers it sends to; a rank with none only takes part in the export.
    """

    transport: Literal["cuda_ipc", "shared_memory"]
    receivers: tuple[int, ...]


def plan_delivery(wanted: Transport, rank_gpus: Sequence[str], worker_gpus: Sequence[str]) -> Delivery:
    """Choose how weights reach the workers.

    Over CUDA IPC each worker gets the whole stream from the first rank on its own GPU; through host memory rank 0
    serves all of them.

    Args:
        wanted: `auto`, `cuda_ipc` or `shared_memory`.
        rank_gpus: `gpu_name` of every rank's device.
        worker_gpus: of every worker's, of all engines that are refitted together.

    Raises:
        UserError: `cuda_ipc` is wanted and a worker has no rank on its GPU.
    """
    apart = sorted({gpu for gpu in worker_gpus if gpu == CPU or gpu not in rank_gpus})
    if not apart and wanted in ("auto", "cuda_ipc"):
        first = {gpu: rank_gpus.index(gpu) for gpu in worker_gpus}
        served = [first[gpu] for gpu in worker_gpus]
        return Delivery("cuda_ipc", tuple(served.count(rank) for rank in range(len(rank_gpus))))
    if wanted == "cuda_ipc":
        raise UserError(
            f"policy.dsv4.refit.transport is cuda_ipc, but no training rank is on GPU {apart[0]} of an engine worker "
            f"(ranks are on {', '.join(rank_gpus)}); set it to shared_memory or auto"
        )
    if wanted == "auto":
        log.info("refit through shared memory: engine workers on %s share no GPU with a training rank", apart)
    return Delivery("shared_memory", (len(worker_gpus), *(0 for _ in rank_gpus[1:])))
