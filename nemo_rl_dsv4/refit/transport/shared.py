"""Buckets between processes of one host: shared memory, or CUDA IPC where both sit on the same GPU.

The sender owns a few slots of one bucket each (two by default: one is filled while the other is read), so at most that
many buckets are in flight. Slots and manifests are announced over a local socket, and a slot is filled again only when
every receiver has given it back. All waits have a timeout.
"""

from __future__ import annotations

import inspect
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.buckets import write_buckets
from nemo_rl_dsv4.refit.manifest import Manifest
from nemo_rl_dsv4.refit.report import BucketTally, RefitReport, Stream
from nemo_rl_dsv4.refit.transport.protocol import Vote, alone, run_dry

_OTHERS = "a receiver of another sender could not stage it"


@dataclass(frozen=True)
class Address:
    """Where a sender listens; plain data, to be handed to receivers by whatever control channel there is.

    Attributes:
        socket: path of a local socket.
        key: hexadecimal secret that both ends prove to know.
    """

    socket: str
    key: str


class SharedSender:
    """Sends refits to receivers of the same host.

    Args:
        capacity_bytes: size of a slot (`bucket_bytes(refit_buffer_size_gb)`).
        receivers: engines that will connect to each refit.
        slots: buckets in flight at most.
        device: None for shared memory; a CUDA device for slots on it that receivers on the same GPU map.
        through: the GPU that holds the weights, for slots in shared memory; see `scratch` of `write_buckets`.
        timeout: seconds without any progress after which a refit is given up.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        receivers: int = 1,
        slots: int = 2,
        device: torch.device | None = None,
        through: torch.device | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._receivers, self._timeout = receivers, timeout
        shared = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="dsv4-refit-", dir=shared if shared.is_dir() else None))
        self._finalize = weakref.finalize(self, shutil.rmtree, self._folder, True)  # also when the process ends
        self.address = Address(str(self._folder / "socket"), secrets.token_hex(16))
        self._listener = Listener(self.address.socket, "AF_UNIX", authkey=bytes.fromhex(self.address.key))
        self._scratch = None if through is None else torch.empty(capacity_bytes, dtype=torch.uint8, device=through)
        self._buffers: list[torch.Tensor] = []
        self._announced: list[Any] = []
        for slot in range(slots):
            if device is None:
                path = str(self._folder / f"slot-{slot}")
                self._buffers.append(_map_file(path, capacity_bytes))
                self._announced.append((path, capacity_bytes))
            else:
                from torch.multiprocessing.reductions import reduce_tensor

                buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
                self._buffers.append(buffer)
                self._announced.append(reduce_tensor(buffer))

    def send(self, stream: Stream, *, version: int, vote: Vote = alone) -> RefitReport:
        """Send one refit to all receivers and wait until every one has staged it and been told to commit.

        Args:
            stream: what `export_weights` yields. It is consumed to its end even when receivers give up, since other
                ranks take part in it.
            version: policy version.
            vote: see `Vote`, where several senders serve one set of engines.

        Raises:
            UserError: a receiver did not connect, failed, or fell silent, here or at another sender; then none commits.
        """
        links: list[Connection] = []
        source, agreed = iter(stream), False  # an export is its own iterator, and fills buckets itself
        try:
            report = self._send_buckets(source, links, version)
            agreed = True
        except BaseException as error:
            for link in links:
                _tell(link, ("abort", str(error)))
            if isinstance(error, Exception):
                run_dry(source)
            if isinstance(error, (OSError, EOFError)):
                raise UserError(f"refit: a receiver of version {version} closed its end ({error!r})") from error
            raise
        finally:
            everyone = vote(agreed)
            for link in links:
                if agreed:
                    _tell(link, ("commit", None) if everyone else ("abort", _OTHERS))
                link.close()
        if not everyone:
            raise UserError(f"refit: not committed, {_OTHERS}")
        return report

    def _send_buckets(
        self, source: Iterator[tuple[str, torch.Tensor]], links: list[Connection], version: int
    ) -> RefitReport:
        tally = BucketTally()
        self._accept(links)
        held: list[set[int]] = [set() for _ in links]

        def free_slot(index: int) -> torch.Tensor:
            slot = index % len(self._buffers)
            self._await_slot(links, held, slot)
            return self._buffers[slot]

        for manifest, buffer in write_buckets(source, free_slot, version=version, scratch=self._scratch):
            slot = manifest.index % len(self._buffers)
            tally.add(manifest)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            fields = manifest.to_fields()
            for link, slots in zip(links, held, strict=True):
                link.send(("bucket", slot, fields))
                slots.add(slot)
        report = tally.report()
        self._await_staged(links, held, report.checksum)
        return report

    def close(self) -> None:
        """Free slots and socket."""
        self._listener.close()
        self._buffers.clear()
        self._finalize()

    def _accept(self, links: list[Connection]) -> None:
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(self._timeout)
        while len(links) < self._receivers:
            try:
                links.append(self._listener.accept())
            except TimeoutError:
                raise UserError(
                    f"refit: {len(links)} of {self._receivers} receivers connected within {self._timeout:g} s"
                ) from None
            links[-1].send(("slots", self._announced))

    def _await_slot(self, links: list[Connection], held: list[set[int]], slot: int) -> None:
        for number, (link, slots) in enumerate(zip(links, held, strict=True)):
            while slot in slots:
                kind, value = _receive(link, self._timeout, f"receiver {number}")
                if kind != "free":
                    raise UserError(f"refit: receiver {number} gave up: {value}")
                slots.discard(value)

    def _await_staged(self, links: list[Connection], held: list[set[int]], checksum: str) -> None:
        for number, (link, slots) in enumerate(zip(links, held, strict=True)):
            for slot in list(slots):
                self._await_slot([link], [slots], slot)
            kind, value = _receive(link, self._timeout, f"receiver {number}")
            if kind != "staged":
                raise UserError(f"refit: receiver {number} gave up: {value}")
            if value != checksum:
                raise UserError(f"refit: receiver {number} staged checksum {value}; {checksum} was sent")


class SharedReceiver:
    """One engine's end for one refit.

    Args:
        address: the sender's.
        timeout: seconds without any progress after which the refit is given up.
        device: this process's number of the sender's GPU; None takes the sender's own. They differ where each process
            sees other GPUs.

    Raises:
        UserError: no sender listens there.
    """

    def __init__(self, address: Address, *, timeout: float = 600.0, device: int | None = None) -> None:
        self._timeout, self._device = timeout, device
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._link = Client(address.socket, "AF_UNIX", authkey=bytes.fromhex(address.key))
                break
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > deadline:
                    raise UserError(f"refit: no sender listens at {address.socket} after {timeout:g} s") from None
                time.sleep(0.05)
        self._slots: list[torch.Tensor] = []

    def buckets(self) -> Iterator[tuple[Manifest, torch.Tensor]]:
        """See `BucketReceiver.buckets`."""
        last = False
        while not last:
            kind, *rest = self._next()
            if kind == "slots":
                self._map(rest[0])
                continue
            if kind != "bucket":
                raise UserError(f"refit: the sender gave up: {rest[0]}")
            slot, manifest = rest[0], Manifest.from_fields(rest[1])
            yield manifest, self._slots[slot]
            if self._slots[slot].is_cuda:
                torch.cuda.synchronize(self._slots[slot].device)
            _tell(self._link, ("free", slot))  # a sender that has given up says so in the next message
            last = manifest.last

    def agree(self, checksum: str) -> None:
        """See `BucketReceiver.agree`."""
        try:
            _tell(self._link, ("staged", checksum))  # a sender that has given up said so in its last message
            kind, value = self._next()
        finally:
            self.close()
        if kind != "commit":
            raise UserError(f"refit: not committed, the sender gave up: {value}")

    def fail(self, reason: str) -> None:
        """See `BucketReceiver.fail`."""
        _tell(self._link, ("failed", reason))
        self.close()

    def close(self) -> None:
        """Unmap the slots and hang up."""
        self._link.close()
        self._slots.clear()

    def _next(self) -> tuple[Any, ...]:
        try:
            return _receive(self._link, self._timeout, "the sender")
        except (EOFError, OSError):
            raise UserError("refit: the sender hung up before the refit was complete") from None

    def _map(self, announced: list[Any]) -> None:
        for first, second in announced:
            # A path and its size, or what rebuilds a CUDA tensor of the sender, and its arguments.
            if isinstance(first, str):
                self._slots.append(_map_file(first, second))
            else:
                self._slots.append(first(*_on_device(first, second, self._device)))


def gpu_name(device: torch.device) -> str:
    """What a GPU is called by every process of its host, whatever number each gives it; "cpu" for the CPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _map_file(path: str, size: int) -> torch.Tensor:
    """uint8 [size] over a file in shared memory, made if it does not exist."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _on_device(rebuild: Callable[..., torch.Tensor], arguments: tuple[Any, ...], device: int | None) -> tuple[Any, ...]:
    """The arguments of torch's `rebuild_cuda_tensor` with this process's number of the GPU."""
    if device is None:
        return arguments
    bound = inspect.signature(rebuild).bind(*arguments)
    bound.arguments["storage_device"] = device
    return bound.args


def _receive(link: Connection, timeout: float, who: str) -> tuple[Any, ...]:
    if not link.poll(timeout):
        raise UserError(f"refit: nothing from {who} for {timeout:g} s")
    return link.recv()


def _tell(link: Connection, message: tuple[str, Any]) -> None:
    """Send what nobody may be listening to any more."""
    with suppress(OSError):
        link.send(message)
