"""How policy ranks of one or several hosts meet: a TCP store on rank 0's host, at the address that Ray has of it."""

from __future__ import annotations

import logging
import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

SECONDS_TO_MEET = 300.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
_SIOCGIFADDR = 0x8915


def join_ranks(store: dist.TCPStore | tuple[str, int], *, rank: int, world: int, device: str, address: str) -> None:
    """Make torch's default process group: gloo for CPU tensors, NCCL (RCCL) beside it on GPUs.

    gloo tells its peers the address that the host's name resolves to, which on many systems is a loopback; without
    `GLOO_SOCKET_IFNAME` it gets the interface of Ray's address here. NCCL looks for interfaces itself, and
    `NCCL_SOCKET_IFNAME` is its own to read.

    On CPUs torch's flight recorder is off unless `TORCH_FR_BUFFER_SIZE` is set: torch 2.11 adds a group to it without a
    lock, and here two threads start collectives over gloo, training and the writer of its state. On GPUs training's go
    over NCCL, which has a recorder of its own.

    Args:
        store: rank 0's, or its host and port.
        rank: this process's.
        world: number of ranks.
        device: `cpu` or `cuda`.
        address: of this rank's host.

    Raises:
        UserError: rank 0 or another rank cannot be reached from this host.
    """
    if device == "cpu":
        os.environ.setdefault(FLIGHT_RECORDER, "0")
    interface = None if GLOO_INTERFACE in os.environ else interface_of(address)
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
        log.info("rank %d: gloo uses interface %s, which has Ray's address %s", rank, interface, address)
    where = "on this host" if isinstance(store, dist.TCPStore) else f"at {store[0]}:{store[1]}"
    try:
        if isinstance(store, tuple):
            store = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=SECONDS_TO_MEET))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise UserError(
            f"policy rank {rank} of {world} on host {address} could not meet the others through the store {where} "
            f"({reason}); hosts must reach each other by TCP on any port: set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface that connects them (docs/cluster.md)"
        ) from error


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface with an IPv4 address; None where none has it."""
    try:
        import fcntl

        wanted = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # no IPv4 address
                continue
            if found == wanted:
                return name
    return None
