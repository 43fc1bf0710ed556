"""What one refit carried and what was found: counts, bytes, seconds by phase, and a checksum."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.checksum import item_checksum
from nemo_rl_dsv4.refit.manifest import Manifest

log = logging.getLogger(__name__)

Checks = Literal["sampled", "all"]
SAMPLE = 48
"""Weights compared after a refit with checks "sampled"."""
LOST = ("attn_sink", "tid2eid", "gate.bias")
"""Ends of names that are always compared as well: small tensors which engines have lost without a word."""

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
        version: policy version, None where the sender gave none.
        phases: seconds by phase, such as receive, load, repoint, verify.
        phase_bytes: bytes by phase: of the payload received and loaded, of weights compared.
        findings: what is wrong with the engine's weights now, one line each; empty is good.
        notes: what was decided for the refits to come, one line each, said once.
    """

    tensors: int
    quantized: int
    bytes: int
    seconds: float
    checksum: str
    version: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    phase_bytes: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for JSON."""
        return {
            **asdict(self),
            "phases": dict(self.phases),
            "phase_bytes": dict(self.phase_bytes),
            "findings": list(self.findings),
            "notes": list(self.notes),
        }

    def with_receive(self, seconds: float) -> RefitReport:
        """The report of an engine that took `seconds` to receive and stage what it then loaded."""
        phases, sizes = {"receive": seconds, **self.phases}, {"receive": self.bytes, **self.phase_bytes}
        return replace(self, phases=phases, phase_bytes=sizes, seconds=self.seconds + seconds)


def refit_metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers to log under `refit/`, of engines that were refitted together (`RefitReport.to_dict` of each).

    Returns:
        `tensors`, `quantized`, `bytes` of one engine; `seconds`, `seconds_PHASE`, `bytes_PHASE` of the slowest and the
        largest; `findings` of all.
    """
    numbers = {key: float(reports[0][key]) for key in ("tensors", "quantized", "bytes")}
    numbers["seconds"] = max(float(report["seconds"]) for report in reports)
    numbers["findings"] = float(sum(len(report["findings"]) for report in reports))
    for key, label in (("phases", "seconds"), ("phase_bytes", "bytes")):
        for phase in dict.fromkeys(phase for report in reports for phase in report[key]):
            numbers[f"{label}_{phase}"] = max(float(report[key].get(phase, 0.0)) for report in reports)
    return numbers


def checked_names(names: list[str], checks: Checks, seed: int) -> list[str]:
    """The weights that are compared after a refit: all of them, or 48 that `seed` draws and those of `LOST`."""
    others = [name for name in names if not name.endswith(LOST)]
    if checks == "all" or len(others) <= SAMPLE:
        return names
    drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed % 2**63))
    return [*(others[i] for i in drawn[:SAMPLE].tolist()), *(name for name in names if name.endswith(LOST))]


def require_valid(report: RefitReport, *, on_finding: Literal["stop", "warn"] = "stop") -> None:
    """Raise `UserError` with the first findings of a report, or log them where a recipe says to go on.

    Raises:
        UserError: the report has findings and `on_finding` is "stop".
    """
    if not report.findings:
        return
    more = f" (and {len(report.findings) - 3} more)" if len(report.findings) > 3 else ""
    message = f"refit of version {report.version}: {'; '.join(report.findings[:3])}{more}"
    if on_finding == "stop":
        raise UserError(message)
    log.warning("%s", message)


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
        self._sum = combine_checksums(self._sum, item_checksum(name, tensor))

    def report(self) -> RefitReport:
        """Return the tally so far."""
        return RefitReport(self._tensors, self._quantized, self._bytes, self._seconds, f"{self._sum:016x}")


class BucketTally:
    """What `StreamTally` counts, of a refit that leaves in buckets; their manifests hold the checksums already."""

    def __init__(self) -> None:
        self._tensors = self._quantized = self._bytes = self._sum = 0
        self._start = time.perf_counter()

    def add(self, manifest: Manifest) -> None:
        """Count one bucket."""
        self._tensors += len(manifest.entries)
        for entry in manifest.entries:
            self._quantized += entry.name.endswith(".scale")
            self._bytes += entry.bytes
            self._sum += entry.checksum

    def report(self) -> RefitReport:
        """Return the tally so far; seconds since it was made."""
        seconds = time.perf_counter() - self._start
        return RefitReport(self._tensors, self._quantized, self._bytes, seconds, f"{self._sum % 2**64:016x}")


def combine_checksums(total: int, item: int) -> int:
    """Add an item's checksum to a stream's. A sum, not a chain: buckets may arrive in any order."""
    return (total + item) % 2**64
