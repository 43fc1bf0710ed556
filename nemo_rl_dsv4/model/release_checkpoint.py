"""Read a checkpoint in DeepSeek's released format: official names, FP4 or FP8 experts, FP8 elsewhere, UE8M0 scales.

Opening checks every header (names, dtypes, shapes, scale grids, file lengths) before any weight is read; reading checks
every value (scales, codes, NaN, tables). A checkpoint that opens and reads is complete and means what it says.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.official_names import check_names, expected_tensors, mtp_kind, tensor_kind
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.model.safetensors_file import StoredTensor, read_header
from nemo_rl_dsv4.model.stored_weight import (
    FP4_SPEC,
    FP8_SPEC,
    decode_weight,
    is_quantized,
    require_finite,
    require_table,
    scale_grid,
)

__all__ = ["ReleaseCheckpoint", "read_release_checkpoint", "write_release_checkpoint"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


class ReleaseCheckpoint:
    """A checked folder: `config`, and tensors by official name, one at a time.

    Attributes:
        config: its `config.json` with the overrides applied.
        mtp: what the dropped `mtp.` tensors were: "none", "next_token" or "drafter".
        dropped: number of `mtp.` tensors, which the policy does not train.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config_overrides: Mapping[str, Any] | None = None,
        unscaled_fp8: Collection[str] = (),
    ) -> None:
        """Open `directory` and check all headers.

        Args:
            directory: folder with config.json and model.safetensors, or shards and their index.
            config_overrides: keys that replace those of config.json (a recipe's `hf_config_overrides`).
            unscaled_fp8: official names of FP8 weights that may lack a scale and then count as scale 1.

        Raises:
            UserError: any damage, naming file and tensor.
        """
        self.directory = Path(directory)
        self.config = read_config(self.directory, config_overrides)
        quantization = self.config.get("quantization_config") or {}
        self._power_of_two = quantization.get("scale_fmt") == "ue8m0"
        found = _all_headers(self.directory)
        mtp = [name for name in found if name.startswith("mtp.")]
        self.mtp, self.dropped = mtp_kind(mtp), len(mtp)
        stored = {name: tensor for name, tensor in found.items() if not name.startswith("mtp.")}
        self._shapes = expected_tensors(self.config)
        self._weights = {name: tensor for name, tensor in stored.items() if not name.endswith(_SCALE_SUFFIXES)}
        check_names(self._weights, self._shapes, str(self.directory))
        self._scales = self._match_scales(stored)
        for name, tensor in self._weights.items():
            self._check(name, tensor, unscaled_fp8)

    def __iter__(self) -> Iterator[str]:
        """Official names in export order, scales left out."""
        return iter(self._shapes)

    def stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor as stored and, where it has one, its scale as stored."""
        scale = self._scales.get(name)
        return self._weights[name].read(), None if scale is None else scale.read()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype a tensor is stored in."""
        return self._weights[name].dtype

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (weight name, scale as stored) of every quantized weight that has one."""
        for name, scale in self._scales.items():
            yield name, scale.read()

    def value(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read one official tensor and decode it, see `decode`."""
        return self.decode(name, *self.stored(name), dtype)

    def decode(
        self, name: str, data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return what `stored` gave as values: tables int64, FP32-class tensors float32, the rest `dtype`.

        Raises:
            UserError: an invalid scale, a NaN or infinite element, an id that is no expert.
        """
        where = f"{self._weights[name].path}: {name}"
        kind = tensor_kind(name)
        if kind == "integer":
            require_table(where, data, self.config["n_routed_experts"])
            return data.to(torch.int64)
        if scale is not None:
            return decode_weight(where, data, scale, dtype, power_of_two=self._power_of_two)
        values = data.to(torch.float32 if kind == "fp32" else dtype)
        require_finite(where, values)
        return values

    def _match_scales(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        scales: dict[str, StoredTensor] = {}
        for name, tensor in stored.items():
            suffix = next((s for s in _SCALE_SUFFIXES if name.endswith(s)), None)
            if suffix is None:
                continue
            weight = name.removesuffix(suffix) + ".weight"
            if weight not in self._weights or not is_quantized(self._weights[weight].dtype):
                raise UserError(f"{tensor.path}: scale {name!r} belongs to no quantized weight; unexpected tensor")
            if weight in scales:
                raise UserError(f"{tensor.path}: {weight!r} has two scales, {scales[weight].name!r} and {name!r}")
            scales[weight] = tensor
        return scales

    def _check(self, name: str, tensor: StoredTensor, unscaled_fp8: Collection[str]) -> None:
        kind, shape, path = tensor_kind(name), self._shapes[name], tensor.path
        packed = tensor.dtype in (torch.int8, torch.uint8)
        allowed = {"integer": _INTEGERS, "fp32": _FLOATS, "bf16": _FLOATS}.get(kind, (*_FLOATS, torch.float8_e4m3fn))
        if tensor.dtype not in allowed and not (packed and kind == "expert.weight"):
            raise UserError(f"{path}: {name!r} is {tensor.dtype}; wanted one of {', '.join(map(str, allowed))}")
        wanted = (shape[0], shape[1] // 2) if packed else shape
        if tensor.shape != wanted:
            raise UserError(f"{path}: {name!r} is {list(tensor.shape)}; config.json wants {list(wanted)}")
        if not is_quantized(tensor.dtype):
            return
        scale = self._scales.get(name)
        if scale is None:
            if not packed and name in unscaled_fp8:
                return
            raise UserError(
                f"{path}: {name!r} is {'FP4' if packed else 'FP8'} without a scale (looked for "
                f"{', '.join(_SCALE_SUFFIXES)}); its codes mean nothing alone, fetch a complete checkpoint"
            )
        grid = scale_grid(shape, (FP4_SPEC if packed else FP8_SPEC).block)
        if scale.dtype not in _SCALE_DTYPES or scale.shape != grid:
            raise UserError(
                f"{scale.path}: scale {scale.name!r} is {scale.dtype} {list(scale.shape)}; wanted float32 or E8M0 "
                f"bytes {list(grid)}"
            )


def read_release_checkpoint(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    config_overrides: Mapping[str, Any] | None = None,
    layout: Layout = AUTOMODEL,
) -> dict[str, torch.Tensor]:
    """Read a whole checkpoint into a state dict under a model's names, experts stacked.

    FP8 and FP4 weights are dequantized, exactly for float32 and bfloat16. Needs memory for the result and one tensor.

    Args:
        directory: the checkpoint folder.
        dtype: dtype of all tensors but the FP32 ones of a release (which stay float32) and tables (int64).
        config_overrides: keys that replace those of config.json.
        layout: whose names to use.

    Returns:
        {key: tensor}, complete for `DeepseekV4ForCausalLM.load_state_dict(..., strict=True)`.

    Raises:
        UserError: any damage, naming file and tensor.
    """
    checkpoint = ReleaseCheckpoint(directory, config_overrides=config_overrides)
    experts = checkpoint.config["n_routed_experts"]
    state: dict[str, torch.Tensor] = {}
    for name in checkpoint:
        value, slot = checkpoint.value(name, dtype), layout.slot(name)
        if slot.expert is None:
            state[slot.key] = value
            continue
        if slot.key not in state:
            state[slot.key] = torch.empty(layout.stack_shape(value.shape, slot, experts), dtype=dtype)
        layout.view(state[slot.key], slot).copy_(value)
    return state


def _all_headers(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    if not index.exists():
        return read_header(directory / SINGLE)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read as an index with a weight_map ({error!r})") from error
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: names the shard {file!r}; wanted a file name in {directory}")
        for name, tensor in read_header(directory / file).items():
            if weight_map.get(name) != file:
                raise UserError(
                    f"{tensor.path}: tensor {name!r} unexpected; {INDEX} puts it in {weight_map.get(name)!r}"
                )
            found[name] = tensor
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise UserError(f"{directory / weight_map[missing[0]]}: tensor {missing[0]!r} missing; {INDEX} lists it there")
    return found
