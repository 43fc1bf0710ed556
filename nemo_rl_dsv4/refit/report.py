"""What one refit carried: counts, bytes, seconds and a checksum that both ends compute alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch

Stream = Iterable[tuple[str, torch.Tensor]]
"""Official names with tensors; a quantized weight is followed at once by its scale."""


@dataclass(frozen=True)
class RefitReport:
    """Result of sending or receiving one set of weights.

    Attributes:
        tensors: items of the stream, scales included.
        quantized: weights that travelled as FP8 or FP4 codes.
        bytes: payload without names.
        seconds: from the first item asked for to the last.
        checksum: 16 hex digits over names, dtypes, shapes and bytes, whatever the order; equal on both ends of a
            transport that lost nothing.
    """

    tensors: int
    quantized: int
    bytes: int
    seconds: float
    checksum: str

    def to_dict(self) -> dict[str, int | float | str]:
        """Return the fields as plain values, for JSON and metrics."""
        return asdict(self)


class StreamTally:
    """Counts and checksums a stream while it passes; read `report()` after its end."""

    def __init__(self) -> None:
        self._tensors = self._quantized = self._bytes = self._sum = 0
        self._seconds = 0.0

    def watch(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass a stream through, tallying each item before its consumer sees it."""
        start = time.perf_counter()
        for name, tensor in stream:
            self._add(name, tensor)
            yield name, tensor
        self._seconds += time.perf_counter() - start

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors += 1
        self._quantized += name.endswith(".scale")
        self._bytes += tensor.numel() * tensor.element_size()
        digest = hashlib.blake2b(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode(), digest_size=8)
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
        # A sum, not a chain: buckets may arrive in any order.
        self._sum = (self._sum + int.from_bytes(digest.digest(), "little")) % 2**64

    def report(self) -> RefitReport:
        """Return the tally so far."""
        return RefitReport(self._tensors, self._quantized, self._bytes, self._seconds, f"{self._sum:016x}")
