"""Host copies of what a rank keeps on its GPU, while something else needs the room.

A tensor that leaves stays the object it is: its storage is emptied and filled again, so that views of it, FSDP's
shards, an optimizer's state and caches of quantized weights need not know. Until it is back nobody may compute with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.parallel import local_shard

_PIECE = 256 << 20
"""torch rounds pinned memory up to a power of two; pieces of this size lose nothing."""
_ALIGNMENT = 256


class _Parked(NamedTuple):
    storage: torch.UntypedStorage
    offset: int
    size: int


class HostShelf:
    """Room in host memory for a set of tensors; pinned for those of a GPU, and kept from one use to the next.

    Args:
        tensors: called whenever they leave. DTensors give up this rank's shard. Tensors elsewhere than on `device`,
            and tensors over memory that torch does not own, stay.
        device: where they live.
        name: of the set, in error messages.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], device: torch.device, name: str) -> None:
        self._tensors, self._device, self._name = tensors, device, name
        self._pieces: list[torch.Tensor] = []
        self._parked: list[_Parked] = []

    @property
    def parked_bytes(self) -> int:
        """Bytes that are in host memory and not on the device."""
        return sum(parked.size for parked in self._parked)

    @torch.no_grad()
    def to_host(self) -> int:
        """Move what is on the device to host memory; returns the bytes that left.

        Called again, it moves what has come to the device since.

        Raises:
            UserError: the host has no memory for it; everything is where it was.
        """
        leaving: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_shard(tensor).untyped_storage()
            if storage.device.type == self._device.type and storage.nbytes() and storage.resizable():
                leaving.setdefault(storage.data_ptr(), storage)
        end = max((parked.offset + parked.size for parked in self._parked), default=0)
        parked = []
        for storage in leaving.values():
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            parked.append(_Parked(storage, offset, storage.nbytes()))
            end = offset + storage.nbytes()
        self._reserve(end)
        for one in parked:
            for device_part, host_part in self._parts(one):
                host_part.copy_(device_part, non_blocking=True)
        self._synchronize()
        for one in parked:
            one.storage.resize_(0)
        self._parked += parked
        return sum(one.size for one in parked)

    @torch.no_grad()
    def to_device(self) -> None:
        """Move everything back.

        Raises:
            torch.OutOfMemoryError: the device has no room; what did not fit is still in host memory, and the next call
                goes on with it.
        """
        waiting, self._parked = self._parked, []
        try:
            while waiting:
                waiting[-1].storage.resize_(waiting[-1].size)
                for device_part, host_part in self._parts(waiting[-1]):
                    device_part.copy_(host_part, non_blocking=True)
                waiting.pop()
        finally:
            self._parked = waiting
            self._synchronize()

    def _parts(self, parked: _Parked) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of a storage beside their place in host memory, cut where a piece ends."""
        whole = torch.empty(0, dtype=torch.uint8, device=parked.storage.device).set_(parked.storage)
        done = 0
        while done < parked.size:
            piece, start = divmod(parked.offset + done, _PIECE)
            count = min(parked.size - done, _PIECE - start)
            yield whole[done : done + count], self._pieces[piece][start : start + count]
            done += count

    def _reserve(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        try:
            if self._pieces and len(self._pieces[-1]) < _PIECE and size > self._size():
                grown = self._pieces[-1]
                self._pieces[-1] = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=pinned)
                self._pieces[-1][: len(grown)] = grown
            while size > self._size():
                rest = min(size - self._size(), _PIECE)
                self._pieces.append(torch.empty(rest, dtype=torch.uint8, pin_memory=pinned))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"{self._name} of this rank need {size / 2**30:.1f} GiB of host memory while the rollout engines have "
                f"the GPU, and they are not to be had ({reason}); give the host more memory, or set "
                "policy.dsv4.trainer_sleep and policy.offload_optimizer_for_logprob to false"
            ) from error

    def _size(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
