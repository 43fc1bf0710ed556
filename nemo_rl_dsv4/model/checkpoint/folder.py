"""What stands beside the shards of a checkpoint folder: config, index, tokenizer and other files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_dsv4.model.checkpoint.shards import INDEX
from nemo_rl_dsv4.model.safetensors_file import read_header

if TYPE_CHECKING:
    from nemo_rl_dsv4.model.checkpoint.convert_tensor import ScaleLayout

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of an FP8 checkpoint with power-of-two scales."""
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_WRITTEN_HERE = {INDEX, "config.json", "conversion.json", "SERVE.md", "partial.json"}


def output_config(config: Mapping[str, Any], to: str, layout: ScaleLayout) -> dict[str, Any]:
    """Return a source's config.json for its conversion: quantization, expert and weight dtypes follow the tensors."""
    out = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
    if to == "fp8":
        made = dict(FP8_CONFIG)
        if layout.dtype == torch.float32 and layout.spec.scale == "float32":
            del made["scale_fmt"]
        out["quantization_config"] = config.get("quantization_config") or made
        out["expert_dtype"] = "fp8"
    out["torch_dtype"] = "bfloat16"
    return out


def write_index(folder: Path, shards: Mapping[str, Sequence[str]]) -> int:
    """Write the index of {file: tensor names} and return the bytes of all tensors."""
    total = sum(tensor.bytes for file in shards for tensor in read_header(folder / file).values())
    weight_map = {name: file for file, names in sorted(shards.items()) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def copy_other_files(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer and everything else that is neither weights, nor written here, nor hidden.

    A link is followed only within `source`, or to the `blobs` of the hub cache that `source` is a snapshot of: a link
    elsewhere would put a file of the reader's machine, whichever it names, into a folder that may be published.

    Returns:
        A note for each link that was left out.
    """
    roots, notes = _roots(source), []
    for path in sorted(source.rglob("*")):
        place = path.relative_to(source)
        if any(part.startswith(".") for part in place.parts) or not path.is_file():
            continue
        if path.suffix in _WEIGHT_FILES or place.name.endswith(".index.json") or str(place) in _WRITTEN_HERE:
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in roots):
            notes.append(f"{place} is a link to {target}, outside of {source}; it is not copied")
            continue
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
    return notes


def _roots(source: Path) -> list[Path]:
    """Folders whose files may be copied; a hub cache has `snapshots/<commit>/<file>` linked to `blobs/<hash>`."""
    real = Path(os.path.realpath(source))
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]


def write_text(path: Path, text: str) -> None:
    """Write a file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
