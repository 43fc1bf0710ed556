"""Buckets by broadcast: one sender, any number of engines, over gloo or NCCL.

Two buffers alternate: while one is on the wire the next bucket is packed. A manifest is announced through the channel's
store before its bytes; afterwards every engine says what it has staged, and the sender lets all commit or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.buckets import write_buckets
from nemo_rl_dsv4.refit.manifest import Manifest
from nemo_rl_dsv4.refit.report import BucketTally, RefitReport, Stream
from nemo_rl_dsv4.refit.transport.channel import Channel
from nemo_rl_dsv4.refit.transport.protocol import Vote, alone, run_dry

_ABORT, _FAILED, _STAGED, _COMMIT = "abort ", "failed ", "staged ", "commit"


def _bucket(version: int, index: int) -> str:
    return f"refit/{version}/bucket/{index}"


def _answer(version: int, rank: int) -> str:
    return f"refit/{version}/answer/{rank}"


def _verdict(version: int) -> str:
    return f"refit/{version}/verdict"


class BroadcastSender:
    """The policy's end.

    Args:
        channel: rank 0 of a channel.
        capacity_bytes: size of a bucket.
    """

    def __init__(self, channel: Channel, *, capacity_bytes: int) -> None:
        self._channel = channel
        self._buffers = [torch.empty(capacity_bytes, dtype=torch.uint8, device=channel.device) for _ in range(2)]
        self._read: list[str] = []

    def send(self, stream: Stream, *, version: int, vote: Vote = alone) -> RefitReport:
        """Send one refit and wait until every engine has staged it.

        Args:
            stream: what `export_weights` yields. It is consumed to its end even when engines give up, since other ranks
                take part in it.
            version: policy version; each refit, a repeated one too, has a number of its own.
            vote: see `Vote`, where several senders serve one set of engines.

        Raises:
            UserError: an engine could not stage it or fell silent, or another sender's engine; then none commits. Or
                the stream raised, or this version was sent before.
        """
        channel, source = self._channel, iter(stream)
        agreed = False
        try:
            if channel.has(_bucket(version, 0)):
                raise UserError(f"refit: version {version} was sent before; give this refit a number of its own")
            for key in self._read:
                channel.forget(key)
            report = self._send_buckets(source, version)
            self._await_answers(report.checksum, version)
            agreed = True
        except Exception as error:
            with suppress(UserError):  # engines that can still be reached need not wait for their timeout
                channel.put(_verdict(version), f"{_ABORT}{error}")
            run_dry(source)
            raise
        finally:
            everyone = vote(agreed)
        if not everyone:
            channel.put(_verdict(version), f"{_ABORT}an engine of another sender could not stage it")
            raise UserError("refit: not committed, an engine of another sender could not stage it")
        channel.put(_verdict(version), _COMMIT)
        return report

    def _send_buckets(self, source: Iterator[tuple[str, torch.Tensor]], version: int) -> RefitReport:
        channel, tally, pending, index = self._channel, BucketTally(), [None, None], 0
        self._read = [_verdict(version), *(_answer(version, rank) for rank in channel.engines)]

        def free_buffer(number: int) -> torch.Tensor:
            nonlocal index
            index = number
            channel.wait(pending[number % 2])
            self._stop_if_refused(version)
            return self._buffers[number % 2]

        try:
            for manifest, buffer in write_buckets(source, free_buffer, version=version):
                tally.add(manifest)
                if buffer.is_cuda:
                    torch.cuda.current_stream(buffer.device).synchronize()
                channel.put(_bucket(version, index), manifest.to_json())
                self._read.append(_bucket(version, index))
                pending[index % 2] = channel.broadcast(buffer[: manifest.bytes])
            for work in pending:
                channel.wait(work)
        except Exception as error:
            with suppress(UserError):
                for work in pending:
                    channel.wait(work)
            with suppress(UserError):
                after = index + 1 if _bucket(version, index) in self._read else index
                channel.put(_bucket(version, after), f"{_ABORT}{error}")
                self._read.append(_bucket(version, after))
            raise
        return tally.report()

    def _stop_if_refused(self, version: int) -> None:
        for rank in self._channel.engines:
            if self._channel.has(_answer(version, rank)):
                self._check(self._channel.take(_answer(version, rank), f"engine {rank}"), rank, None)

    def _await_answers(self, checksum: str, version: int) -> None:
        for rank in self._channel.engines:
            self._check(self._channel.take(_answer(version, rank), f"engine {rank}"), rank, checksum)

    def _check(self, answer: str, rank: int, checksum: str | None) -> None:
        if not answer.startswith(_STAGED):
            raise UserError(f"refit: not committed, engine {rank} could not stage it: {answer.removeprefix(_FAILED)}")
        if checksum is not None and answer.removeprefix(_STAGED) != checksum:
            raise UserError(
                f"refit: not committed, engine {rank} staged checksum {answer.removeprefix(_STAGED)}; "
                f"{checksum} was sent"
            )


class BroadcastReceiver:
    """One engine's end of one refit.

    Args:
        channel: this engine's end; it serves one refit after the other.
        version: policy version that the sender was told to send.
    """

    def __init__(self, channel: Channel, *, version: int) -> None:
        self._channel, self._version = channel, version
        self._buffer = torch.empty(0, dtype=torch.uint8, device=channel.device)
        self._next, self._over = 0, False

    def buckets(self) -> Iterator[tuple[Manifest, torch.Tensor]]:
        """See `BucketReceiver.buckets`."""
        while not self._over:
            text = self._channel.take(_bucket(self._version, self._next), "the sender")
            if text.startswith(_ABORT):
                self._over = True
                raise UserError(f"refit: the sender gave up: {text.removeprefix(_ABORT)}")
            manifest = Manifest.from_json(text)
            if manifest.bytes > self._buffer.numel():
                self._buffer = torch.empty(manifest.bytes, dtype=torch.uint8, device=self._channel.device)
            self._channel.wait(self._channel.broadcast(self._buffer[: manifest.bytes]))
            self._next, self._over = self._next + 1, manifest.last
            yield manifest, self._buffer

    def agree(self, checksum: str) -> None:
        """See `BucketReceiver.agree`."""
        self._channel.put(_answer(self._version, self._channel.rank), f"{_STAGED}{checksum}")
        verdict = self._channel.take(_verdict(self._version), "the sender")
        if verdict != _COMMIT:
            raise UserError(f"refit: not committed, the sender gave up: {verdict.removeprefix(_ABORT)}")

    def fail(self, reason: str) -> None:
        """Refuse the refit, and receive what the sender has announced meanwhile, so that nobody waits for this end."""
        with suppress(UserError):  # the caller has the reason
            self._channel.put(_answer(self._version, self._channel.rank), f"{_FAILED}{reason}")
            for _ in self.buckets():
                pass
