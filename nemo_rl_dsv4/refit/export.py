"""Training weights to rollout weights: official names, codes and scales as a checkpoint would hold them.

An engine computes with the same values as QAT's fake quantization in training: both round with the spec of the same
profile site. Blocks are those of one official tensor: w1 and w3 of an expert, stacked side by side in training, are
rounded apart, and experts never share a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.stored_weight import require_finite, require_table, scale_name
from nemo_rl_dsv4.numerics import QuantSpec, RolloutProfile, get_profile, quantize, scale_to_e8m0_bytes

SCALE_DTYPES = (torch.float32, torch.uint8, torch.float8_e8m0fnu)


def export_weights(
    state_dict: Mapping[str, torch.Tensor],
    profile: str | RolloutProfile,
    *,
    unquantized: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
    layout: Layout = AUTOMODEL,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (official name, tensor) for every weight, one at a time, in export order.

    A quantized weight [out, in] comes as codes (float8_e4m3fn [out, in]; FP4 int8 [out, in/2]) and then at once its
    scale `<module>.scale`, the raw grid [ceil(out/rows), ceil(in/cols)]. Fused partners are neighbours. Every other
    tensor keeps the dtype class of a release: float32 for hyper-connections, sinks, position tables and router bias,
    int64 for hash tables, `unquantized` for the rest. Memory above the training weights is one tensor.

    Args:
        state_dict: `DeepseekV4ForCausalLM.state_dict()`, buffers included. DTensors are gathered one by one, so every
            rank must iterate to the end.
        profile: a rollout profile or its name; decides format, block and scale rule of `linear.weight` and
            `expert.weight`. fnuz profiles get the checkpoint's e4m3fn codes, which their engines reinterpret.
        unquantized: dtype of tensors that a release stores in BF16, and of weights the profile does not quantize.
            float32 leaves a float32 policy's values as they are.
        scale_dtype: float32 values, or E8M0 bytes as uint8 or float8_e8m0fnu (power-of-two scales only).
        layout: whose names and stacks `state_dict` has.

    Raises:
        UserError: a name that is not the layout's; a NaN or infinite element (tensor and index named); an all-zero hash
            table; a `scale_dtype` that cannot hold the profile's scales.
    """
    if scale_dtype not in SCALE_DTYPES:
        raise UserError(f"scale_dtype is {scale_dtype}; wanted one of {', '.join(map(str, SCALE_DTYPES))}")
    profile = get_profile(profile) if isinstance(profile, str) else profile
    gathered: tuple[str, torch.Tensor] | None = None
    for name, slot in layout.split(state_dict):
        if gathered is None or gathered[0] != slot.key:
            gathered = (slot.key, _whole(state_dict[slot.key]))
        yield from export_tensor(name, layout.view(gathered[1], slot), profile, unquantized, scale_dtype)


def export_tensor(
    name: str,
    value: torch.Tensor,
    profile: RolloutProfile,
    unquantized: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one official tensor (any strides) as `export_weights` does: one item, or codes and scale."""
    kind, value = tensor_kind(name), value.detach()
    if kind == "integer":
        require_table(name, value)
        yield name, value.to(torch.int64)
        return
    spec = None if kind in ("bf16", "fp32") else _checkpoint_spec(profile.site(kind), profile.name)
    if spec is None:
        require_finite(name, value)
        yield name, value.to(torch.float32 if kind == "fp32" else unquantized).contiguous()
        return
    quantized = quantize(value, spec, check_finite=True, name=name)
    yield name, quantized.data.view(torch.int8) if spec.fmt == "e2m1" else quantized.data
    scale = quantized.scale
    if scale_dtype != torch.float32:
        scale = scale_to_e8m0_bytes(scale, name=scale_name(name)).view(scale_dtype)
    yield scale_name(name), scale


def _checkpoint_spec(spec: QuantSpec | None, profile: str) -> QuantSpec | None:
    """Replace e4m3fnuz by the e4m3fn a checkpoint holds: codes read as fnuz are half, so max 224 gives equal values."""
    if spec is None or spec.fmt != "e4m3fnuz":
        return spec
    if spec.fnuz_max != 224.0:
        raise UserError(f"profile {profile}: weights with fnuz_max {spec.fnuz_max:g} have no e4m3fn twin; wanted 224")
    return replace(spec, fmt="e4m3fn")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
