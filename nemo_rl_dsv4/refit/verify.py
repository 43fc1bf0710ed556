"""Prove that exporting unchanged weights changes nothing: the rollout then starts from the checkpoint itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint
from nemo_rl_dsv4.model.stored_weight import decode_scale, decode_weight, is_quantized, scale_name
from nemo_rl_dsv4.numerics import RolloutProfile, get_profile
from nemo_rl_dsv4.refit.export import export_tensor, export_weights
from nemo_rl_dsv4.refit.report import Stream


@dataclass(frozen=True)
class VerifyReport:
    """What became of each weight when it was exported without having been trained.

    Attributes:
        profile: the rollout profile.
        identical: weights whose codes (or plain bytes) and scales are the same.
        renormalised: same values and format, other bytes: a block whose largest code is half of the format's maximum
            or less has a smaller scale that holds it too.
        recoded: same values in another format, such as FP4 experts sent as FP8.
        changed: weights whose values differ, with the largest difference over the largest magnitude.
    """

    profile: str
    identical: int = 0
    renormalised: int = 0
    recoded: int = 0
    changed: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every exported weight has the checkpoint's values."""
        return not self.changed

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `ok` as plain values, for JSON."""
        return {**asdict(self), "ok": self.ok}


def verify_export(
    source: Mapping[str, torch.Tensor] | str | Path,
    profile: str | RolloutProfile,
    *,
    config_overrides: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Export unchanged weights under `profile` and compare with where they came from.

    Args:
        source: a checkpoint folder, compared with its stored bytes; or an AutoModel state dict, whose first export
            stands for the checkpoint and is exported once more from its decoded values.
        profile: a rollout profile or its name.
        config_overrides: values that replace those of a checkpoint's config.json.

    Raises:
        UserError: a damaged checkpoint, or weights that cannot be exported.
    """
    profile = get_profile(profile) if isinstance(profile, str) else profile
    if isinstance(source, Mapping):
        triples = _exported(source, profile)
    else:
        triples = _read(ReleaseCheckpoint(Path(source), config_overrides=config_overrides))
    counts = {"identical": 0, "renormalised": 0, "recoded": 0}
    changed: dict[str, float] = {}
    for name, stored, value in triples:
        plain = value.dtype if stored[1] is None else torch.bfloat16
        sent = _pair(name, export_tensor(name, value, profile, unquantized=plain))
        error = _relative_error(value, _values(name, sent))
        if error == 0.0:
            counts[_verdict(name, stored, sent)] += 1
        else:
            changed[name] = error
    return VerifyReport(profile.name, **counts, changed=changed)


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


def _verdict(name: str, stored: _Pair, sent: _Pair) -> Literal["identical", "renormalised", "recoded"]:
    if stored[0].element_size() != sent[0].element_size() or stored[0].shape != sent[0].shape:
        return "recoded"
    if (stored[1] is None) != (sent[1] is None):
        return "recoded"
    same = torch.equal(stored[0].view(torch.uint8), sent[0].view(torch.uint8))
    if stored[1] is not None and sent[1] is not None:
        scales = [decode_scale(s, name=scale_name(name), power_of_two=False) for s in (stored[1], sent[1])]
        same = same and torch.equal(*scales)
    return "identical" if same else "renormalised"
