"""Prove that exporting unchanged weights changes nothing: the rollout then starts from the checkpoint itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_dsv4.model.checkpoint.fp4_range import scales_fit_fp8
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint
from nemo_rl_dsv4.model.stored_weight import decode_scale, decode_weight, is_quantized, scale_name
from nemo_rl_dsv4.numerics import QuantSpec, RolloutProfile, get_profile
from nemo_rl_dsv4.numerics.formats import e8m0_bytes_to_scale, is_power_of_two
from nemo_rl_dsv4.refit.export import export_tensor, export_weights
from nemo_rl_dsv4.refit.report import Stream

Verdict = Literal["identical", "recoded", "renormalised", "changed"]
VERDICTS: tuple[Verdict, ...] = ("identical", "recoded", "renormalised", "changed")


@dataclass(frozen=True)
class VerifyReport:
    """What became of each weight when it was exported without having been trained.

    identical: codes (or plain bytes) and scales are the same. recoded: same values in another format, such as FP4
    experts sent as FP8, or a weight that the profile does not quantize. renormalised: same values and format, other
    bytes; a finding, because the source scales were not kept. changed: values differ; a finding.

    Attributes:
        profile: the rollout profile.
        classes: tensor class ("linear.weight", "expert.weight", "bf16", "fp32", "integer") -> verdict -> weights.
        findings: weight name -> what is wrong with it.
        changed: weights whose values differ, with the largest difference over the largest magnitude.
    """

    profile: str
    classes: dict[str, dict[Verdict, int]] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every weight left as it came."""
        return not self.findings

    def count(self, verdict: Verdict) -> int:
        """Number of weights with this verdict, all classes together."""
        return sum(counts.get(verdict, 0) for counts in self.classes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `ok` as plain values, for JSON."""
        return {**asdict(self), "ok": self.ok}


def verify_export(
    source: Mapping[str, torch.Tensor] | str | Path,
    profile: str | RolloutProfile,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    on_weight: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Export unchanged weights under `profile` and compare with where they came from, byte by byte.

    As in training, the source's scales are kept beside the weights and offered to the export.

    Args:
        source: a checkpoint folder, compared with its stored bytes; or an AutoModel state dict, whose first export
            stands for the checkpoint and is exported once more from its decoded values.
        profile: a rollout profile or its name.
        config_overrides: values that replace those of a checkpoint's config.json.
        on_weight: called with each weight's name once it has been compared.

    Raises:
        UserError: a damaged checkpoint, or weights that cannot be exported.
    """
    profile = get_profile(profile) if isinstance(profile, str) else profile
    if isinstance(source, Mapping):
        triples = _exported(source, profile)
    else:
        triples = _read(ReleaseCheckpoint(Path(source), config_overrides=config_overrides))
    report = VerifyReport(profile.name)
    for name, stored, value in triples:
        plain = value.dtype if stored[1] is None else torch.bfloat16
        kept = None if stored[1] is None else decode_scale(stored[1], name=scale_name(name), power_of_two=False)
        sent = _pair(name, export_tensor(name, value, profile, unquantized=plain, source_scale=kept))
        error = _relative_error(value, _values(name, sent))
        verdict = "changed" if error else _verdict(stored, sent)
        counts = report.classes.setdefault(tensor_kind(name), dict.fromkeys(VERDICTS, 0))
        counts[verdict] += 1
        if verdict == "changed":
            report.changed[name] = error
            report.findings[name] = f"values changed, largest relative difference {error:.3g}"
        elif verdict == "renormalised":
            report.findings[name] = "same values under other codes and scales"
        if on_weight is not None:
            on_weight(name)
    return report


class ExportCheck:
    """Notes weights that the rollout could not hold as the checkpoint does, while `load_into` passes them by.

    Give the object as `on_stored`. Pieces whose format settles the question (FP8 with power-of-two scales; FP4 whose
    scales lie close enough) cost nothing; others are decoded, exported and compared.

    Attributes:
        changed: {official name: largest difference over the largest magnitude}.
    """

    def __init__(self, profile: str | RolloutProfile) -> None:
        self.profile = get_profile(profile) if isinstance(profile, str) else profile
        self.changed: dict[str, float] = {}

    def __call__(self, name: str, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Check rows of a stored weight; they begin at a multiple of 128."""
        if scale is None or _surely_exact(data, scale, self.profile.site(tensor_kind(name))):
            return
        value = decode_weight(name, data, scale, torch.float32, power_of_two=False)
        error = _relative_error(value, _values(name, _pair(name, export_tensor(name, value, self.profile))))
        if error:
            self.changed[name] = max(error, self.changed.get(name, 0.0))


def _surely_exact(data: torch.Tensor, scale: torch.Tensor, spec: QuantSpec | None) -> bool:
    if spec is None or spec.fmt == "e2m1" or spec.block != (128, 128) or spec.scale != "ue8m0" or spec.amax_floor:
        return False
    if data.dtype in (torch.int8, torch.uint8):
        return scales_fit_fp8(scale)
    return scale.dtype != torch.bfloat16 and bool(is_power_of_two(_scale_values(scale)).all())


def _scale_values(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype == torch.float32 else e8m0_bytes_to_scale(scale)


_Pair = tuple[torch.Tensor, torch.Tensor | None]
_Triple = tuple[str, _Pair, torch.Tensor]


def _read(checkpoint: ReleaseCheckpoint) -> Iterator[_Triple]:
    """Yield name, stored bytes, and values: float32, or the stored dtype of what is not quantized."""
    for name in checkpoint:
        stored = checkpoint.stored(name)
        dtype = stored[0].dtype if stored[0].dtype in (torch.bfloat16, torch.float16) else torch.float32
        yield name, stored, checkpoint.decode(name, *stored, dtype)


def _exported(state_dict: Mapping[str, torch.Tensor], profile: RolloutProfile) -> Iterator[_Triple]:
    stream = export_weights(state_dict, profile, unquantized=torch.float32)
    for name, data in stream:
        stored = (data, next(stream)[1] if is_quantized(data.dtype) else None)
        yield name, stored, _values(name, stored)


def _pair(name: str, stream: Stream) -> _Pair:
    items = dict(stream)
    return items[name], items.get(scale_name(name))


def _values(name: str, pair: _Pair) -> torch.Tensor:
    data, scale = pair
    return data if scale is None else decode_weight(name, data, scale, torch.float32, power_of_two=False)


def _relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    difference = (wanted.double() - found.double()).abs().max().item()
    return difference / max(wanted.double().abs().max().item(), torch.finfo(torch.float32).tiny)


def _verdict(stored: _Pair, sent: _Pair) -> Verdict:
    if stored[0].element_size() != sent[0].element_size() or stored[0].shape != sent[0].shape:
        return "recoded"
    if (stored[1] is None) != (sent[1] is None):
        return "recoded"
    same = torch.equal(stored[0].view(torch.uint8), sent[0].view(torch.uint8))
    if stored[1] is not None and sent[1] is not None:
        scales = [decode_scale(s, name="scale", power_of_two=False) for s in (stored[1], sent[1])]
        same = same and torch.equal(*scales)
    return "identical" if same else "renormalised"
