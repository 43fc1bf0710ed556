"""What every transport offers its receiver, and the one way to use it: stage everything, agree, only then commit.

All receivers of a refit stage it completely. When each of them has, and all hold the same checksum, the sender lets
them commit; if one fails or falls silent before that, none does, and every engine stays on its old version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.manifest import Manifest
from nemo_rl_dsv4.refit.staging import StagedWeights

Vote = Callable[[bool], bool]
"""Several senders can serve one set of engines, each a part of its workers (over CUDA IPC, the worker on its own GPU).
Each sender calls its vote once a refit with whether its receivers have staged it, and lets them commit only if the vote
returns true: every sender said so. It is a collective over the senders."""


def alone(good: bool) -> bool:
    """The vote of a refit with one sender."""
    return good


def run_dry(stream: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Consume the rest of a stream that nobody wants any more: exporting is collective, other ranks wait in it."""
    with suppress(Exception):
        for _ in stream:
            pass


class BucketReceiver(Protocol):
    """One engine's end of a transport, for one refit."""

    def buckets(self) -> Iterator[tuple[Manifest, torch.Tensor]]:
        """Yield (manifest, uint8 buffer) to the last bucket. A buffer is the sender's again once the next is asked for.

        Raises:
            UserError: nothing came within the timeout, or the sender gave up.
        """
        ...

    def agree(self, checksum: str) -> None:
        """Tell the sender what was staged and wait until all receivers may commit.

        Raises:
            UserError: another receiver failed, or the sender fell silent.
        """
        ...

    def fail(self, reason: str) -> None:
        """Tell the sender that this engine could not stage the refit."""
        ...


def receive_staged(
    receiver: BucketReceiver, expected: Mapping[str, tuple[int, ...]], device: torch.device | str = "cpu"
) -> StagedWeights:
    """Stage one refit completely, on this engine and all others; afterwards it may be committed.

    Args:
        receiver: this engine's end.
        expected: official name -> unquantized shape of every tensor.
        device: where staged tensors rest.

    Raises:
        UserError: a broken, damaged or incomplete transfer here or at another engine; nothing has been written.
    """
    staged = StagedWeights(expected, device)
    try:
        for manifest, buffer in receiver.buckets():
            staged.add(manifest, buffer)
        staged.check_complete()
    except UserError as error:
        receiver.fail(str(error))
        raise
    receiver.agree(staged.checksum)
    return staged
