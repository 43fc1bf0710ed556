"""What a conversion does to each tensor, planned from headers and scales, and done one tensor at a time.

action        stored as                     becomes
copied        anything that may stay        the same bytes, scale included
dequantized   FP8 or FP4 with a scale       BF16, exact for power-of-two scales
merged        FP4 1x32                      FP8 128x128 with the same values
requantized   FP4 1x32, scales too far apart   FP8 128x128, with a loss
quantized     float                         FP8 128x128
upcast        FP8 without a scale (listed)  BF16, codes taken as values
rounded       float32 or float16            BF16
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint
from nemo_rl_dsv4.model.checkpoint.classes import SCALE_SUFFIXES, stored_kind
from nemo_rl_dsv4.model.checkpoint.fp4_range import scales_fit_fp8
from nemo_rl_dsv4.model.checkpoint.shard_writer import Entry
from nemo_rl_dsv4.model.checkpoint.values import check_values, decode_tensor
from nemo_rl_dsv4.model.safetensors_file import ShardReader, StoredTensor
from nemo_rl_dsv4.model.stored_weight import FP8_SPEC, decode_weight, is_quantized, scale_grid
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, merge_fp4_to_fp8, quantize, scale_to_e8m0_bytes
from nemo_rl_dsv4.numerics.formats import NumericsError

Action = Literal["copied", "dequantized", "merged", "requantized", "quantized", "upcast", "rounded"]
Target = Literal["bf16", "fp8"]
_PACKED = (torch.int8, torch.uint8)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True)
class ScaleLayout:
    """How a checkpoint stores the scales of FP8 weights: name suffix, dtype, and the rule that makes new ones."""

    suffix: str = ".scale"
    dtype: torch.dtype = torch.float8_e8m0fnu
    spec: QuantSpec = FP8_SPEC

    def stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Return float32 scales in this layout's dtype."""
        return scale_to_e8m0_bytes(scale).view(self.dtype) if self.dtype in _E8M0 else scale


@dataclass(frozen=True)
class Planned:
    """One weight of the output: what is done, and what is written."""

    source: StoredTensor
    source_scale: StoredTensor | None
    action: Action
    weight: Entry
    scale: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """The tensors to write."""
        return [self.weight] if self.scale is None else [self.weight, self.scale]

    @property
    def bytes(self) -> int:
        """Size of what is written."""
        return sum(entry.bytes for entry in self.entries)


def scale_layout(checked: CheckedCheckpoint) -> ScaleLayout:
    """Return the layout that most scales of the checkpoint have, FP8 weights first; E8M0 `.scale` without any."""
    for packed in (False, True):
        found = Counter(
            (next(s for s in SCALE_SUFFIXES if scale.name.endswith(s)), scale.dtype)
            for name, scale in checked.scales.items()
            if (checked.weights[name].dtype in _PACKED) == packed
        )
        if found:
            suffix, dtype = found.most_common(1)[0][0]
            floats = dtype not in _E8M0
            spec = QuantSpec("e4m3fn", (128, 128), "float32") if floats and not checked.power_of_two else FP8_SPEC
            return ScaleLayout(suffix, torch.float32 if floats else dtype, spec)
    return ScaleLayout()


def plan_tensor(checked: CheckedCheckpoint, name: str, to: Target, layout: ScaleLayout, reader: ShardReader) -> Planned:
    """Decide what happens to one weight; FP4 scales, and codes in doubt only, are read to see if FP8 holds them."""
    tensor, scale = checked.weights[name], checked.scales.get(name)
    kind, packed = stored_kind(name, tensor.dtype), tensor.dtype in _PACKED
    shape = (tensor.shape[0], 2 * tensor.shape[1]) if packed else tensor.shape
    bf16 = Entry(name, torch.bfloat16, shape)
    if is_quantized(tensor.dtype):
        if scale is None:
            return Planned(tensor, None, "upcast", bf16)
        if to == "bf16":
            return Planned(tensor, scale, "dequantized", bf16)
        if packed:
            return _as_fp8(tensor, scale, _fp4_action(tensor, scale, reader), shape, layout)
        return _copied(tensor, scale)
    if kind in ("linear.weight", "expert.weight") and to == "fp8":
        return _as_fp8(tensor, None, "quantized", shape, layout)
    if to == "bf16" and kind in ("linear.weight", "expert.weight", "bf16") and tensor.dtype != torch.bfloat16:
        return Planned(tensor, None, "rounded", bf16)
    return _copied(tensor, scale)


def _copied(tensor: StoredTensor, scale: StoredTensor | None) -> Planned:
    beside = None if scale is None else Entry(scale.name, scale.dtype, scale.shape)
    return Planned(tensor, scale, "copied", Entry(tensor.name, tensor.dtype, tensor.shape), beside)


def _as_fp8(
    tensor: StoredTensor, scale: StoredTensor | None, action: Action, shape: tuple[int, ...], layout: ScaleLayout
) -> Planned:
    name = tensor.name.removesuffix(".weight") + layout.suffix
    return Planned(
        tensor,
        scale,
        action,
        Entry(tensor.name, torch.float8_e4m3fn, shape),
        Entry(name, layout.dtype, scale_grid(shape, (128, 128))),
    )


def _fp4_action(tensor: StoredTensor, scale: StoredTensor, reader: ShardReader) -> Action:
    stored = reader.read(scale)
    if stored.dtype != torch.bfloat16 and scales_fit_fp8(stored):
        return "merged"
    _, exact = _merge(f"{tensor.path}: {tensor.name}", reader.read(tensor), stored)
    return "merged" if exact else "requantized"


def _merge(where: str, data: torch.Tensor, scale: torch.Tensor) -> tuple[Quantized, bool]:
    """FP4 as FP8, and whether no value changed.

    A tile whose scales lie too far apart by themselves may still fit if its largest codes are small: quantizing anew
    takes the scale from the values.
    """
    try:
        return merge_fp4_to_fp8(data, _float_scale(scale), name=where), True
    except NumericsError:
        values = decode_weight(where, data, scale, torch.float32)
        fp8 = quantize(values, FP8_SPEC, check_finite=True, name=where)
        return fp8, torch.equal(values, dequantize(fp8, torch.float32))


def _float_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.float() if scale.dtype == torch.bfloat16 else scale


def convert_tensor(
    planned: Planned,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    layout: ScaleLayout,
    *,
    power_of_two: bool,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Do what was planned and prove it.

    Returns:
        The tensor to write, its scale, and the largest difference over the largest magnitude (0.0 where nothing was
        lost, which is checked value by value for `merged` and `dequantized`).

    Raises:
        UserError: a value that the source should not have (NaN, an invalid scale), or a lossless step that was not.
    """
    check_values(planned.source, data, scale, power_of_two=power_of_two, experts=experts)
    if planned.action == "copied":
        return data, scale, 0.0
    if planned.action in ("upcast", "rounded"):
        out = data.to(torch.bfloat16)
        return out, None, relative_error(data.float(), out.float())
    where = f"{planned.source.path}: {planned.source.name}"
    values = decode_tensor(planned.source, data, scale, torch.float32, power_of_two=power_of_two, experts=experts)
    if planned.action == "dequantized":
        out = values.to(torch.bfloat16)
        error = relative_error(values, out.float())
        if error and power_of_two:
            raise UserError(f"{where}: BF16 does not hold its values (relative error {error:.2g}); scales out of range")
        return out, None, error
    if planned.action == "merged":
        assert scale is not None
        fp8, _ = _merge(where, data, scale)
    else:
        fp8 = quantize(values, layout.spec, check_finite=True, name=planned.source.name)
        if layout.spec.scale == "ue8m0":  # the form that reading and quantizing again gives
            fp8 = quantize(dequantize(fp8, torch.float32), layout.spec)
    written = layout.stored(fp8.scale)
    back = decode_weight(where, fp8.data, written, torch.float32, power_of_two=False)
    error = relative_error(values, back)
    if error and planned.action == "merged":
        raise UserError(f"{where}: FP4 to FP8 changed its values (relative error {error:.2g})")
    return fp8.data, written, error


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude of float32 tensors, 0.0 for equal ones."""
    if torch.equal(wanted, found):
        return 0.0
    difference = (wanted - found).abs().max().item()
    return difference / max(wanted.abs().max().item(), torch.finfo(torch.float32).tiny)
