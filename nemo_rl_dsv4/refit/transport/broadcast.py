"""Buckets by broadcast: one sender, any number of engines, over gloo or NCCL.

The group is a torch process group with the sender as one of its ranks. Two buffers alternate: while one is on the wire
the next bucket is packed. Afterwards all ranks agree by an all-reduce whether to commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.buckets import numbered_buckets
from nemo_rl_dsv4.refit.manifest import Manifest, write_bucket
from nemo_rl_dsv4.refit.report import RefitReport, Stream, StreamTally

_ABORT = -1  # in place of a manifest's length


class BroadcastSender:
    """The policy's end.

    Args:
        group: process group of this rank and all engines.
        source: this rank's index in the group.
        capacity_bytes: size of a bucket.
        device: where buckets are packed: "cpu" for gloo, a CUDA device for NCCL.
        timeout: seconds a bucket may take.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        source: int = 0,
        capacity_bytes: int,
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
    ) -> None:
        self._group, self._source, self._device = group, source, torch.device(device)
        self._capacity, self._timeout = capacity_bytes, timedelta(seconds=timeout)
        self._buffers = [torch.empty(capacity_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def send(self, stream: Stream, *, version: int) -> RefitReport:
        """Send one refit and wait until every engine has staged it.

        Raises:
            UserError: an engine could not stage it (then none commits), or fell silent; or the stream raised.
        """
        tally, pending = StreamTally(), [None, None]
        try:
            for index, items, last in numbered_buckets(tally.watch(stream), self._capacity):
                slot = index % 2
                _wait(pending[slot], self._timeout)
                manifest = write_bucket(items, self._buffers[slot], version=version, index=index, last=last)
                items.clear()
                text = torch.frombuffer(bytearray(manifest.to_json().encode()), dtype=torch.uint8)
                self._broadcast(torch.tensor([text.numel(), manifest.bytes]))
                self._broadcast(text)
                pending[slot] = self._broadcast(self._buffers[slot][: manifest.bytes], wait=False)
            for work in pending:
                _wait(work, self._timeout)
        except Exception:
            with suppress(UserError):  # engines that can still be reached need not wait for their timeout
                for work in pending:
                    _wait(work, self._timeout)
                self._broadcast(torch.tensor([_ABORT, 0]))
            raise
        report = tally.report()
        _agree(self._group, True, report.checksum, self._device, self._timeout)
        return report

    def _broadcast(self, tensor: torch.Tensor, *, wait: bool = True) -> Any:
        work = dist.broadcast(tensor.to(self._device), group=self._group, group_src=self._source, async_op=True)
        if wait:
            _wait(work, self._timeout)
        return work


class BroadcastReceiver:
    """One engine's end; serves one refit after the other. Arguments as for `BroadcastSender`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        source: int = 0,
        capacity_bytes: int,
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
    ) -> None:
        self._group, self._source, self._device = group, source, torch.device(device)
        self._timeout = timedelta(seconds=timeout)
        self._buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._over, self._aborted = True, False

    def buckets(self) -> Iterator[tuple[Manifest, torch.Tensor]]:
        """See `BucketReceiver.buckets`."""
        self._over = self._aborted = False
        while not self._over:
            length, size = self._receive(torch.empty(2, dtype=torch.int64, device=self._device)).tolist()
            if length == _ABORT:
                self._over = self._aborted = True
                raise UserError("refit: the sender gave up")
            text = self._receive(torch.empty(length, dtype=torch.uint8, device=self._device))
            manifest = Manifest.from_json(bytes(text.cpu().numpy()).decode())
            if size > self._buffer.numel():
                raise UserError(f"refit: a bucket of {size} bytes; this engine's buffer has {self._buffer.numel()}")
            self._receive(self._buffer[:size])
            self._over = manifest.last
            yield manifest, self._buffer

    def agree(self, checksum: str) -> None:
        """See `BucketReceiver.agree`."""
        _agree(self._group, True, checksum, self._device, self._timeout)

    def fail(self, reason: str) -> None:
        """Take part in what is left of the refit, so that nobody waits for this engine, and refuse it."""
        del reason
        if not self._over:
            with suppress(UserError):
                for _ in self.buckets():
                    pass
        if self._aborted:
            return  # the sender does not ask for agreement
        with suppress(UserError):  # the caller has the reason
            _agree(self._group, False, "0", self._device, self._timeout)

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        work = dist.broadcast(tensor, group=self._group, group_src=self._source, async_op=True)
        _wait(work, self._timeout)
        return tensor


def _agree(group: dist.ProcessGroup, good: bool, checksum: str, device: torch.device, timeout: timedelta) -> None:
    """All ranks learn whether all are good and hold the same checksum.

    Raises:
        UserError: they do not.
    """
    value = int(checksum, 16) >> 1  # fits int64
    flags = torch.tensor([int(good), value, -value], device=device)
    _wait(dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group, async_op=True), timeout)
    everyone, low, high = flags.tolist()
    if not everyone:
        raise UserError("refit: not committed, an engine could not stage it")
    if low != -high:
        raise UserError("refit: not committed, engines hold different checksums")


def _wait(work: Any, timeout: timedelta) -> None:
    if work is None:
        return
    try:
        done = work.wait(timeout)
    except RuntimeError as error:
        raise UserError(f"refit: a broadcast failed or took over {timeout.total_seconds():g} s ({error})") from error
    if done is False:
        raise UserError(f"refit: a broadcast took over {timeout.total_seconds():g} s")
