"""One training rank's end of a refit through memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastSender
from nemo_rl_dsv4.refit.transport.channel import listen, open_channel
from nemo_rl_dsv4.refit.transport.shared import SharedSender, gpu_name

Stream = Iterable[tuple[str, torch.Tensor]]


class WeightSender:
    """Sends to engine workers: those on this rank's GPU, those of its host, or by broadcast also those of others.

    Slots are allocated for one refit and given back after it: between refits the GPU's memory is the training's.

    Args:
        device: the rank's.
        address: of this host, by which other hosts reach it.
    """

    def __init__(self, device: torch.device, address: str) -> None:
        self._device, self._address = device, address
        self._sender: SharedSender | None = None
        self._store: dist.TCPStore | None = None
        self._bucket_bytes, self.receivers = 0, 0

    @property
    def gpu(self) -> str:
        """What every process of this host calls the rank's GPU."""
        return gpu_name(self._device)

    def open(self, transport: str, receivers: int, capacity_bytes: int) -> tuple[str, str | int] | None:
        """Get ready for one refit.

        Args:
            transport: `cuda_ipc`, `shared_memory` or `broadcast`.
            receivers: workers that will connect to this rank.
            capacity_bytes: size of a bucket; two are in flight.

        Returns:
            What the workers need: socket and key, or host and port of a broadcast's store. None where there is no
            receiver.
        """
        self._close()
        self._bucket_bytes, self.receivers = capacity_bytes, receivers
        if not receivers:
            return None
        if transport == "broadcast":
            self._store = listen(self._address)
            return self._address, self._store.port
        gpu = self._device if self._device.type == "cuda" else None
        device, through = (self._device, None) if transport == "cuda_ipc" else (None, gpu)
        self._sender = SharedSender(capacity_bytes=capacity_bytes, receivers=receivers, device=device, through=through)
        return self._sender.address.socket, self._sender.address.key

    def send(self, export: Callable[[], Stream | None], version: int) -> dict[str, Any] | None:
        """Export and send to the workers that `open` was told of.

        All ranks do so together, and workers commit only if those of every rank can.

        Args:
            export: makes the stream; None for a rank that took part in it already and has nothing to send.
            version: policy version.

        Returns:
            The sender's report as plain values, None without receivers.

        Raises:
            UserError: see `SharedSender.send`.
        """
        exported = False
        try:
            stream = export()
            exported = True
            if self._store is not None and stream is not None:
                return self._broadcast(self._store, stream, version)
            if self._sender is not None and stream is not None:
                return self._sender.send(stream, version=version, vote=_all_ranks).to_dict()
            return self._take_part(stream or ())
        except BaseException:
            if not exported:
                _all_ranks(False)
            raise
        finally:
            self._close()

    def _broadcast(self, store: dist.TCPStore, stream: Stream, version: int) -> dict[str, Any]:
        """Through a group of this refit alone: nothing of it is left to an engine that fails."""
        try:
            channel = open_channel(store, rank=0, size=1 + self.receivers, device=self._device)
        except UserError:
            self._take_part(stream, can_commit=False)
            raise
        try:
            sender = BroadcastSender(channel, capacity_bytes=self._bucket_bytes)
            return sender.send(stream, version=version, vote=_all_ranks).to_dict()
        finally:
            channel.close()

    def _take_part(self, stream: Stream, *, can_commit: bool = True) -> None:
        """Gather what other ranks send, and vote with them."""
        good = False
        try:
            for _ in stream:
                pass
            good = can_commit
        finally:
            _all_ranks(good)

    def _close(self) -> None:
        self._store = None  # engines that still wait for it hear that it is gone
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # an engine that wakes up takes its KV cache next


def _all_ranks(good: bool) -> bool:
    """Whether all ranks say so."""
    if not dist.is_initialized():
        return good
    votes = torch.tensor([int(good)])
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)
