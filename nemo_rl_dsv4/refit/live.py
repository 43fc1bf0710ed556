"""Put staged weights into a running engine: prepare once, load everything, finalize once, re-point, verify.

Order matters. Nothing is touched before the staged set is complete. The engine's own loaders see the stream once.
Parameters that came out of it in new storage are copied back into the old one, which captured graphs and kernels
know. Then whatever holds parameter objects is pointed at the live ones, and only then is anything verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nemo_rl_dsv4.model.stored_weight import FP8_SPEC, decode_weight, scale_name
from nemo_rl_dsv4.numerics import Quantized, dequantize
from nemo_rl_dsv4.numerics.formats import e8m0_bytes_to_scale, is_power_of_two
from nemo_rl_dsv4.refit.checksum import bytes_checksum
from nemo_rl_dsv4.refit.direct import DirectEngine, DirectWrites
from nemo_rl_dsv4.refit.references import find_references, live_tensors, repoint, stale_references
from nemo_rl_dsv4.refit.report import Checks, RefitReport, Stream, checked_names
from nemo_rl_dsv4.refit.staging import StagedWeights


class LiveEngine(DirectEngine, Protocol):
    """What a refit needs of an engine."""

    def load(self, stream: Stream) -> set[str]:
        """Prepare, load a whole stream by official names, finalize; return the parameters that a loader wrote.

        On an exception the engine's own state (patches, loaders, placeholders) is restored as far as it can be.
        """
        ...

    def refresh_derived(self) -> None:
        """Recompute in place what is derived from weights at load time and is no parameter."""
        ...

    def read_back(self, name: str) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """Values that the kernels now compute with for one official weight, and which part of it they are.

        None if this engine process holds no part of it.
        """
        ...

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, float32 values) of every weight scale in its kernel layout."""
        ...

    def reset_caches(self) -> None:
        """Drop what was computed with the old weights."""
        ...


class LiveRefit:
    """Refits one engine again and again.

    Make it once, when the engine has loaded its checkpoint and before the first refit: it remembers where every
    parameter lies and who holds it.

    Args:
        engine: the engine.
        checks: compare 48 weights, drawn anew for each version, or all of them, with what was sent.
        power_of_two: scales must be powers of two.
        direct: observe two refits, then write the next ones into the engine's memory; see `refit.direct`. Not for an
            engine that gives its memory back in between (a level-2 sleep).
    """

    def __init__(
        self, engine: LiveEngine, *, checks: Checks = "sampled", power_of_two: bool = True, direct: bool = False
    ) -> None:
        self.engine, self.power_of_two = engine, power_of_two
        self.checks: Checks = checks
        self.references = find_references(engine.model)
        self._homes = dict(live_tensors(engine.model))
        self._places = {name: tensor.data_ptr() for name, tensor in self._homes.items()}
        self.version: int | None = None
        self.valid = True
        self.direct = DirectWrites(engine) if direct else None

    def apply(self, staged: StagedWeights, *, skip_repointing: bool = False) -> RefitReport:
        """Load a staged refit and return what was found.

        Args:
            staged: all buckets of one version.
            skip_repointing: leave stale references as they are; only for showing that verification finds them.

        Raises:
            UserError: the staged set is incomplete or has a bad scale; the engine still has its old weights.
            Exception: whatever the engine's loaders raised. `valid` is then False until a later refit succeeds.
        """
        phases: dict[str, float] = {}
        with _timed(phases, "check"):
            staged.check_complete(power_of_two=self.power_of_two)
        self.valid = False
        engine = self.engine
        directly = self.direct is not None and self.direct.may_write(staged) and self._is_home()
        observed = None if directly else self.direct
        if observed is not None:
            observed.before_load()
        with _timed(phases, "load"):
            written = self._write(staged) if directly else engine.load(staged.stream())
        with _timed(phases, "repoint"):
            moved = self._return_home()
            engine.refresh_derived()
            if not skip_repointing:
                repoint(engine.model, self.references)
        with _timed(phases, "verify"):
            names = checked_names([name for name, _ in staged.weights()], self.checks, staged.version or 0)
            findings = [*moved, *self._verify(staged, written, names)]
        if directly and findings:
            assert self.direct is not None
            self.direct.stop(f"a direct refit left {findings[0]}")
        if observed is not None and not findings:
            with _timed(phases, "observe"):
                findings += self._compare(staged, observed.after_load(staged))
        engine.reset_caches()
        self.version, self.valid = staged.version, not findings
        weights = list(staged.weights())
        return RefitReport(
            tensors=sum(1 for _ in staged.stream()),
            quantized=sum(staged.pair(name)[1] is not None for name, _ in weights),
            bytes=staged.bytes,
            seconds=sum(phases.values()),
            checksum=staged.checksum,
            version=staged.version,
            phases=phases,
            phase_bytes={"load": staged.bytes, "verify": sum(staged.pair(name)[0].nbytes for name in names)},
            findings=tuple(findings),
            notes=self.direct.take_notes() if self.direct is not None else (),
        )

    def _write(self, staged: StagedWeights) -> set[str]:
        """Write directly; after an error refits go through the loaders again."""
        assert self.direct is not None
        try:
            return self.direct.write(staged)
        except Exception as error:
            self.direct.stop(f"a direct write failed ({type(error).__name__}: {error})")
            raise

    def _is_home(self) -> bool:
        """Whether every parameter is the object it was at the start, where it was: known places are good."""
        live = live_tensors(self.engine.model)
        return live.keys() == self._homes.keys() and all(
            tensor is self._homes[name] and tensor.data_ptr() == self._places[name] for name, tensor in live.items()
        )

    def _return_home(self) -> list[str]:
        """Copy parameters that a loader replaced back into their old storage and register that again."""
        findings = []
        live = live_tensors(self.engine.model)
        for name in self._homes.keys() | live.keys():
            home, now = self._homes.get(name), live.get(name)
            if home is None or now is None:
                findings.append(f"{name}: parameter {'appeared' if home is None else 'disappeared'} in the refit")
            elif now is not home:
                if now.is_meta or now.shape != home.shape or now.dtype != home.dtype:
                    findings.append(
                        f"{name}: the refit left {now.dtype} {list(now.shape)} on {now.device}; "
                        f"the kernels were built for {home.dtype} {list(home.shape)}"
                    )
                    continue
                if now.data_ptr() != home.data_ptr():
                    home.data.copy_(now.data)
                path, _, leaf = name.rpartition(".")
                module = self.engine.model.get_submodule(path)
                registry: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
                registry[leaf] = home
        for name, tensor in live_tensors(self.engine.model).items():
            if name in self._places and tensor.data_ptr() != self._places[name]:
                findings.append(f"{name}: storage moved; captured graphs still read the old one")
        return findings

    def _verify(self, staged: StagedWeights, written: set[str], names: list[str]) -> Iterator[str]:
        parameters = {name for name, _ in self.engine.model.named_parameters()}
        scales = dict(self.engine.scales())
        for name in sorted(parameters - written):
            yield f"{name}: no loader wrote it"
        for reference in stale_references(self.engine.model, self.references):
            yield f"{reference}: stale, it is not the live parameter"
        yield from self._bad_scales(scales)
        yield from self._compare(staged, _differing(staged, names, self.engine.read_back))

    def _compare(self, staged: StagedWeights, names: Sequence[str]) -> Iterator[str]:
        """Findings about weights, one by one."""
        for name in names:
            held = self.engine.read_back(name)
            if held is not None:
                yield from _compare(name, staged, *held)

    def _bad_scales(self, scales: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Findings about scales; waits for a GPU twice, and once more for each that is bad."""
        bad = _read([_invalid(values).any() for values in scales.values()])
        odd = _read([(~is_power_of_two(values)).any() for values in scales.values()]) if self.power_of_two else bad
        for (name, values), is_bad, is_odd in zip(scales.items(), bad, odd, strict=True):
            if is_bad:
                yield f"{name}: {int(_invalid(values).sum())} scales are zero, negative or not finite"
            elif is_odd:
                yield f"{name}: scales are not powers of two"


def _invalid(scales: torch.Tensor) -> torch.Tensor:
    """Which scales are zero, negative or not finite."""
    return ~scales.isfinite() | (scales <= 0)


def _differing(
    staged: StagedWeights,
    names: Sequence[str],
    read_back: Callable[[str], tuple[torch.Tensor, tuple[slice, ...]] | None],
) -> list[str]:
    """Names to compare one by one (`_compare`): those that differ, and those not compared here; one wait for a GPU."""
    compared: list[str] = []
    flags: list[torch.Tensor] = []
    unread: list[str] = []
    for name in names:
        held = read_back(name)
        if held is None:
            continue
        found, part = held
        data, scale = staged.pair(name)
        if data.dtype in (torch.int8, torch.uint8) and scale is not None:
            unread.append(name)  # packed FP4
            continue
        sent = data.to(found.device, non_blocking=True)
        if scale is None:
            sent = sent[part].to(found.dtype)
        else:
            found = found.float()
            sent = _decoded(sent, scale.to(found.device, non_blocking=True))[part]
        if sent.shape != found.shape:
            unread.append(name)
            continue
        differs = sent != found  # NaN differs from itself, minus zero does not from zero
        if found.is_floating_point():
            differs |= found.isinf()
        flags.append(differs.any())
        compared.append(name)
    return [*unread, *(name for name, differs in zip(compared, _read(flags), strict=True) if differs)]


def _decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of FP8 codes [out, in] and a scale grid that were checked before; asks nothing of a GPU.

    Not by the function that reads an engine back: a fault of one would hide in the other.
    """
    values = scale if scale.dtype == torch.float32 else e8m0_bytes_to_scale(scale)
    return dequantize(Quantized(codes, values, FP8_SPEC, codes.shape), torch.float32)


def _read(flags: Sequence[torch.Tensor]) -> list[bool]:
    """The values of bool scalars, with one wait for each device they are on."""
    values: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        there = [index for index, flag in enumerate(flags) if flag.device == device]
        values.update(zip(there, torch.stack([flags[index] for index in there]).tolist(), strict=True))
    return [values[index] for index in range(len(flags))]


def _compare(name: str, staged: StagedWeights, held: torch.Tensor, part: tuple[slice, ...]) -> Iterator[str]:
    data, scale = staged.pair(name)
    data, scale = data.to(held.device), None if scale is None else scale.to(held.device)
    if scale is None:
        values, held = data[part].to(held.dtype), held
    else:
        values, held = decode_weight(name, data, scale, torch.float32, power_of_two=False)[part], held.float()
    sent, found = values.contiguous(), held.contiguous()
    # Minus zero and zero are the same weight; bytes are compared, so add zero to both.
    if sent.is_floating_point():
        sent, found = sent + 0.0, found + 0.0
    if sent.shape != found.shape:
        yield f"{name}: the engine holds {list(found.shape)}; wanted {list(sent.shape)}"
    elif bytes_checksum(sent) != bytes_checksum(found):
        error = (sent.double() - found.double()).abs().max().item()
        scale_label = f" or {scale_name(name)}" if scale is not None else ""
        yield f"{name}{scale_label}: the engine computes with other values, largest difference {error:.3g}"


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    phases[name] = time.perf_counter() - start
