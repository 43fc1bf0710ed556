"""One sender and its engines: a store for messages and a process group of their own for bytes.

Manifests, failures and verdicts go through the store, so that nobody enters a collective before its partner is about
to, and a sender that dies between two buckets leaves no rank stuck in one. The group is not registered with
`torch.distributed`: an engine's own groups, and its default group, are as they were.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError

SENDER = 0
"""Rank of the sender in its channel."""
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_REPORT_ONLY = "0"
"""With torch's default a collective that times out ends the process, and with it the engine."""
_ENQUEUE = threading.Lock()
"""torch 2.11's flight recorder keeps one map for all gloo groups of a process and adds a new one without a lock: two
threads whose groups start collectives at once can end the process with a segmentation fault. Starting one only queues
it. NCCL's first collective waits for the other ends inside this call, which may be threads of this process: no lock."""


@dataclass
class Channel:
    """One end.

    Attributes:
        store: shared by all ends.
        group: a process group, registered or not.
        rank: this end's; the sender has 0.
        size: number of ends.
        device: of the bytes: "cpu" for gloo, this process's GPU for NCCL.
        timeout: seconds that a message or a bucket may take.
    """

    store: dist.Store
    group: Any
    rank: int
    size: int
    device: torch.device
    timeout: float
    broken: str | None = field(default=None, init=False)

    @property
    def engines(self) -> range:
        """Ranks of the receivers."""
        return range(SENDER + 1, self.size)

    def put(self, key: str, text: str) -> None:
        """Publish a message.

        Raises:
            UserError: the store's process is gone.
        """
        try:
            self.store.set(key, text)
        except RuntimeError as error:
            raise UserError(f"refit: the store of the broadcast cannot be reached ({_first_line(error)})") from error

    def has(self, key: str) -> bool:
        """Whether a message is there already."""
        try:
            return bool(self.store.check([key]))
        except RuntimeError as error:
            raise UserError(f"refit: the store of the broadcast cannot be reached ({_first_line(error)})") from error

    def take(self, key: str, who: str) -> str:
        """Wait for a message.

        Raises:
            UserError: none came within the timeout, or the store's process is gone.
        """
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise UserError(f"refit: nothing from {who} for {self.timeout:g} s ({_first_line(error)})") from error

    def forget(self, key: str) -> None:
        """Remove a message that everybody has read."""
        with suppress(RuntimeError):
            self.store.delete_key(key)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to send (or receive into) a contiguous tensor on `device`; `wait` for what it returns.

        Raises:
            UserError: an earlier broadcast failed.
        """
        if self.broken is not None:
            raise UserError(f"refit: this channel broke earlier ({self.broken}); open a new one")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        try:
            with _ENQUEUE if self.device.type == "cpu" else nullcontext():
                return self.group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._failed(_first_line(error)) from error

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is complete.

        Raises:
            UserError: it failed or took longer than the timeout. The channel cannot be used any more.
        """
        if work is None:
            return
        try:
            done = work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._failed(_first_line(error)) from error
        if done is False:
            raise self._failed("timeout")

    def _failed(self, reason: str) -> UserError:
        self.broken = reason
        self._abort()
        return UserError(f"refit: a broadcast failed or took over {self.timeout:g} s ({reason})")

    def _abort(self) -> None:
        with suppress(RuntimeError, AttributeError):
            self.group.abort()

    def close(self) -> None:
        """Leave the group."""
        self.broken = self.broken or "closed"
        self._abort()
        self.group = None


def listen(host: str = "127.0.0.1", *, timeout: float = 600.0) -> dist.TCPStore:
    """The sender's store, on a free port (`.port`); hand host and port to the engines.

    Args:
        host: address that engines reach this process by.
        timeout: seconds that a message may take.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def open_channel(
    store: dist.Store | tuple[str, int], *, rank: int, size: int, device: torch.device | str, timeout: float = 600.0
) -> Channel:
    """Join a channel; returns when all of its ends have.

    Args:
        store: `listen()` of the sender, or its host and port.
        rank: this end's, 0 for the sender.
        size: number of ends. No two of them may be on the same GPU.
        device: "cpu" for gloo, a CUDA device for NCCL.
        timeout: seconds that an end may take to join, and later a message or a bucket.

    Raises:
        UserError: no store there, an end that did not come, or NCCL refuses (two ends on one GPU).
    """
    span, device = timedelta(seconds=timeout), torch.device(device)
    try:
        if isinstance(store, tuple):
            store = dist.TCPStore(*store, is_master=False, timeout=span)
        make = _nccl if device.type == "cuda" else dist.ProcessGroupGloo
        group = make(dist.PrefixStore("group", store), rank, size, span)
    except RuntimeError as error:
        raise UserError(
            f"refit: end {rank} of {size} could not join the broadcast within {timeout:g} s ({_first_line(error)})"
        ) from error
    channel = Channel(store, group, rank, size, device, timeout)
    hello = torch.full((1,), rank, dtype=torch.uint8, device=device)
    channel.wait(channel.broadcast(hello))  # NCCL connects, and refuses, in the first collective
    if int(hello) != SENDER:
        raise UserError(f"refit: end {rank} of {size} received {int(hello)} in place of the sender's greeting")
    return channel


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = _REPORT_ONLY  # read when the group is made
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = before


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
