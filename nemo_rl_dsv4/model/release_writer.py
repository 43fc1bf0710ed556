"""Write a checkpoint in DeepSeek's released format, one shard in memory at a time, visible only when complete."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.folder import FP8_CONFIG
from nemo_rl_dsv4.model.checkpoint.serving import write_serving_notes
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout
from nemo_rl_dsv4.model.official_names import check_names, expected_tensors, tensor_kind
from nemo_rl_dsv4.model.stored_weight import (
    FP4_SPEC,
    FP8_SPEC,
    require_finite,
    require_table,
    scale_grid,
    scale_name,
)
from nemo_rl_dsv4.numerics import QuantSpec, dequantize, quantize, scale_to_e8m0_bytes

ExpertFormat = Literal["fp4", "fp8"]
_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32, "integer": torch.int64}


def write_release_checkpoint(
    state_dict: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    directory: Path,
    tokenizer_dir: Path | None = None,
    expert_format: ExpertFormat = "fp4",
    *,
    max_shard_bytes: int = 4 * 2**30,
    layout: Layout = AUTOMODEL,
) -> None:
    """Write `directory` with sharded safetensors, index, config.json, the tokenizer's files, and how to serve it.

    Routed experts become FP4 with a scale for 32 inputs, or FP8; the other projections FP8 with a scale for 128x128;
    scales are E8M0 bytes in the raw grid; the rest keeps its release dtype. Reading the result and writing it again
    gives the same bytes. The folder appears by one rename when everything is in it.

    Args:
        state_dict: complete `DeepseekV4ForCausalLM.state_dict()`, any float dtype.
        config: official-style config; `quantization_config` and `expert_dtype` are set here.
        directory: must not exist yet.
        tokenizer_dir: folder whose files are copied along, except weights and config.json.
        expert_format: format of the routed experts.
        max_shard_bytes: upper bound of a shard, and of the memory used above the state dict.
        layout: whose names `state_dict` has.

    Raises:
        UserError: a missing or unexpected tensor, a wrong shape, a NaN or infinite element, a folder that exists or
            cannot be written.
    """
    directory = Path(directory)
    if expert_format not in ("fp4", "fp8"):
        raise UserError(f"expert_format is {expert_format!r}; wanted 'fp4' or 'fp8'")
    if directory.exists():
        raise UserError(f"{directory} exists already; remove it or choose another folder for the checkpoint")
    _check_state(state_dict, config, expert_format, layout)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_shards(state_dict, config, partial, expert_format, max_shard_bytes, layout)
        settings = {**config, "quantization_config": FP8_CONFIG, "expert_dtype": expert_format}
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), partial)
        write_serving_notes(partial)
        partial.rename(directory)
    except OSError as error:
        raise UserError(f"{directory}: cannot write the checkpoint ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_state(
    state_dict: Mapping[str, torch.Tensor], config: Mapping[str, Any], expert_format: ExpertFormat, layout: Layout
) -> None:
    shapes = expected_tensors(config)
    slots = dict(layout.split(state_dict))
    check_names(slots, shapes, "checkpoint to write")
    for name, shape in shapes.items():
        found = tuple(layout.view(state_dict[slots[name].key], slots[name]).shape)
        if found != shape:
            raise UserError(f"checkpoint to write: {name!r} is {list(found)}; the config wants {list(shape)}")
        if expert_format == "fp4" and tensor_kind(name) == "expert.weight" and shape[1] % FP4_SPEC.block[1]:
            raise UserError(f"checkpoint to write: {name!r} has {shape[1]} inputs; FP4 wants a multiple of 32")


def _spec(name: str, expert_format: ExpertFormat) -> QuantSpec | None:
    kind = tensor_kind(name)
    if kind == "expert.weight":
        return FP4_SPEC if expert_format == "fp4" else FP8_SPEC
    return FP8_SPEC if kind == "linear.weight" else None


def _stored(name: str, value: torch.Tensor, spec: QuantSpec | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one official tensor as a release stores it: one item, or codes and E8M0 scale."""
    value = value.detach()
    if spec is None:
        kind = tensor_kind(name)
        if kind == "integer":
            require_table(name, value)
        else:
            require_finite(name, value)
        yield name, value.to(_PLAIN[kind]).contiguous()
        return
    quantized = quantize(value, spec, check_finite=True, name=name)
    # A block whose largest value rounds down to half of the format's maximum has the same values under half its scale,
    # which is what requantizing them gives. Storing that form makes read-then-write the identity.
    quantized = quantize(dequantize(quantized, torch.float32), spec)
    yield name, quantized.data.view(torch.int8) if spec.fmt == "e2m1" else quantized.data
    yield scale_name(name), scale_to_e8m0_bytes(quantized.scale).view(torch.float8_e8m0fnu)


def _stored_bytes(name: str, shape: tuple[int, ...], spec: QuantSpec | None) -> int:
    if spec is None:
        return math.prod(shape) * _PLAIN[tensor_kind(name)].itemsize
    return math.prod(shape) // (2 if spec.fmt == "e2m1" else 1) + math.prod(scale_grid(shape, spec.block))


def _write_shards(
    state_dict: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    folder: Path,
    expert_format: ExpertFormat,
    max_shard_bytes: int,
    layout: Layout,
) -> None:
    shards: list[list[str]] = [[]]
    used = total = 0
    for name, shape in expected_tensors(config).items():
        size = _stored_bytes(name, shape, _spec(name, expert_format))
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
        total += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            slot = layout.slot(name)
            tensors.update(_stored(name, layout.view(state_dict[slot.key], slot), _spec(name, expert_format)))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
