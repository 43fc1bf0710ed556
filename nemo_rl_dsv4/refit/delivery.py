"""Which training ranks send a refit to which engine workers, of their host or of others, and through what memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

Transport = Literal["auto", "cuda_ipc", "shared_memory", "broadcast", "folder"]
KEY = "policy.dsv4.refit.transport"
CPU = "cpu"
"""What `gpu_name` calls a process without a GPU."""


class Seat(NamedTuple):
    """Where one end of a refit sits: its host (Ray's node id) and what that host's processes call its GPU."""

    host: str
    gpu: str


@dataclass(frozen=True)
class Delivery:
    """One refit's way from ranks to workers.

    Attributes:
        transport: GPU memory that both map, memory of a host, or NCCL (gloo between CPUs).
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


def plan_delivery(wanted: Transport, ranks: Sequence[Seat], workers: Sequence[Seat]) -> Delivery:
    """Choose how weights reach the workers.

    Over CUDA IPC each worker gets the whole stream from the first rank on its own GPU; through host memory the first
    rank of a host serves all workers of that host. By broadcast a rank that shares its GPU with no worker serves all;
    if there is none, each worker is served by the rank behind the one on its GPU, since NCCL has no two ends on one
    GPU. `auto` takes the first of these ways, in this order, that reaches every worker.

    Args:
        wanted: `auto`, `cuda_ipc`, `shared_memory` or `broadcast`.
        ranks: seat of every rank.
        workers: of every worker, of all engines that are refitted together.

    Raises:
        UserError: `cuda_ipc` is wanted and a worker has no rank on its GPU; `shared_memory`, and a worker's host has
            no rank; `broadcast`, and two ends would be on one GPU.
    """
    apart = sorted({seat for seat in workers if seat.gpu == CPU or seat not in ranks})
    if wanted in ("auto", "cuda_ipc") and not apart:
        return Delivery("cuda_ipc", tuple(ranks.index(seat) for seat in workers), len(ranks))
    if wanted == "cuda_ipc":
        raise UserError(
            f"{KEY} is cuda_ipc, but no training rank is on GPU {_shown(apart[0])} of an engine worker (ranks are on "
            f"{', '.join(map(_shown, ranks))}); set it to auto"
        )
    hosts = [seat.host for seat in ranks]
    strangers = sorted({seat.host for seat in workers} - set(hosts))
    if wanted == "broadcast" or (wanted == "auto" and strangers):
        if wanted == "auto":
            log.info("refit by broadcast: no training rank is on hosts %s of engine workers", strangers)
        return Delivery("broadcast", _broadcasters(ranks, workers), len(ranks))
    if strangers:
        raise UserError(
            f"{KEY} is shared_memory, but no training rank is on host {strangers[0]} of an engine worker; set it to "
            "auto or broadcast"
        )
    if wanted == "auto":
        log.info("refit through shared memory: engine workers on %s share no GPU with a training rank", apart)
    return Delivery("shared_memory", tuple(hosts.index(seat.host) for seat in workers), len(ranks))


def _broadcasters(ranks: Sequence[Seat], workers: Sequence[Seat]) -> tuple[int, ...]:
    """For each worker the rank that serves it over gloo (all on CPUs) or NCCL (none there)."""
    but = f"{KEY} is broadcast (set so, or chosen by auto), but"
    on_cpu = [seat.gpu == CPU for seat in (*ranks, *workers)]
    if all(on_cpu):
        return (0,) * len(workers)
    if any(on_cpu) or len(set(workers)) < len(workers):
        raise UserError(
            f"{but} training ranks are on {', '.join(map(_shown, ranks))} and engine workers on "
            f"{', '.join(map(_shown, workers))}; wanted each worker on a GPU of its own"
        )
    alone = [rank for rank, seat in enumerate(ranks) if seat not in workers]
    if alone:
        return (alone[0],) * len(workers)
    served = tuple((ranks.index(seat) + 1) % len(ranks) if seat in ranks else 0 for seat in workers)
    for worker, rank in enumerate(served):
        if ranks[rank] == workers[worker]:
            raise UserError(
                f"{but} the one training rank and an engine worker are both on GPU {_shown(ranks[rank])}, and NCCL has "
                "no two ends on one GPU; set it to auto"
            )
    return served


def _shown(seat: Seat) -> str:
    return f"{seat.gpu} of host {seat.host}"
