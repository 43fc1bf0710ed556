"""Check a checkpoint folder before a byte of a weight is read: headers, names, dtypes, shapes, scales, experts, config.

Everything found is reported at once. Values (scales, NaN codes, tables) are checked where they are read, or all of them
by `deep_problems`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.classes import (
    MTP,
    SCALE_SUFFIXES,
    UNSCALED_FP8,
    block_of,
    is_listed,
    stored_kind,
)
from nemo_rl_dsv4.model.checkpoint.problems import Problem, problems_error
from nemo_rl_dsv4.model.checkpoint.shards import Shards, scan_shards
from nemo_rl_dsv4.model.hf_config import config_problems, read_config_file
from nemo_rl_dsv4.model.official_names import EXPERT_PARTS, OFFICIAL_EXPERT, OFFICIAL_LAYER, expected_tensors, mtp_kind
from nemo_rl_dsv4.model.safetensors_file import StoredTensor
from nemo_rl_dsv4.model.stored_weight import is_quantized, scale_grid

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)
_INTEGERS = (torch.int64, torch.int32)
_HALVES = (torch.bfloat16, torch.float16)
_PACKED = (torch.int8, torch.uint8)


@dataclass
class CheckedCheckpoint:
    """What a folder holds and everything wrong with it.

    Attributes:
        directory: the folder.
        config: its config.json with overrides applied; None where it cannot be used.
        shards: headers of all files.
        shapes: {official name: shape} that the config asks for, in export order; multi-token prediction left out.
        weights: stored tensors that are no scales, by official name, `mtp.` included.
        scales: {weight name: its scale}.
        mtp: what the `mtp.` tensors are: "none", "next_token" or "drafter".
        problems: findings; a checkpoint with any is not loaded.
        notes: what a user may want to know and what harms nothing.
    """

    directory: Path
    config: dict[str, Any] | None
    shards: Shards
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    scales: dict[str, StoredTensor] = field(default_factory=dict)
    mtp: Literal["none", "next_token", "drafter"] = "none"
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def mtp_names(self) -> list[str]:
        """Names of `mtp.` weights, sorted."""
        return sorted(name for name in self.weights if name.startswith(MTP))

    @property
    def power_of_two(self) -> bool:
        """Whether config.json says that every scale is a power of two."""
        return ((self.config or {}).get("quantization_config") or {}).get("scale_fmt") == "ue8m0"

    def raise_if_damaged(self) -> None:
        """Raise one `UserError` that lists the problems, if there are any."""
        if self.problems:
            raise problems_error(self.directory, self.problems)

    def add(self, tensor: StoredTensor, message: str) -> None:
        """Add a finding about a tensor."""
        self.problems.append(Problem(tensor.path.name, tensor.name, f"{tensor.path}: {message}"))


def check_checkpoint(
    directory: Path,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    unscaled_fp8: Collection[str] = UNSCALED_FP8,
    for_training: bool = True,
) -> CheckedCheckpoint:
    """Read the config and all headers of `directory` and check them against each other; damage is not raised.

    Args:
        directory: folder with config.json and model.safetensors, or shards and their index.
        config_overrides: keys that replace those of config.json (a recipe's `hf_config_overrides`).
        unscaled_fp8: modules or weights whose FP8 codes may lack a scale and then count as scale 1; `*` stands for one
            part of a name.
        for_training: the policy's view: `num_nextn_predict_layers` must be 0, and `mtp.` tensors are not looked at.
            Otherwise those are checked as well, unless the config sets it to 0.
    """
    directory = Path(directory)
    problems: list[Problem] = []
    config = None
    try:
        read = read_config_file(directory, config_overrides)
    except UserError as error:
        problems.append(Problem("config.json", None, str(error)))
    else:
        wrong = config_problems(read, for_training=for_training)
        problems += [Problem("config.json", None, f"{directory}/{message}") for message in wrong]
        config = None if wrong else read
    shards = scan_shards(directory)
    found = CheckedCheckpoint(directory, config, shards, problems=[*problems, *shards.problems])
    found.mtp = mtp_kind(shards.tensors)
    for name, tensor in shards.tensors.items():
        if not name.endswith(SCALE_SUFFIXES):
            found.weights[name] = tensor
    with_mtp = not for_training and config is not None and config.get("num_nextn_predict_layers", 0) > 0
    _match_scales(found, with_mtp)
    if config is not None:
        found.shapes = expected_tensors(config)
        if shards.complete:
            _check_names(found, with_mtp)
        _check_forms(found)
    for name, tensor in found.weights.items():
        if with_mtp or not name.startswith(MTP):
            _check_tensor(found, name, tensor, unscaled_fp8)
    if shards.stray:
        found.notes.append(f"not named by the index, and not read: {', '.join(shards.stray)}")
    return found


def _match_scales(found: CheckedCheckpoint, with_mtp: bool) -> None:
    for name, tensor in found.shards.tensors.items():
        suffix = next((s for s in SCALE_SUFFIXES if name.endswith(s)), None)
        if suffix is None or (name.startswith(MTP) and not with_mtp):
            continue
        weight = name.removesuffix(suffix) + ".weight"
        if weight in found.weights and is_quantized(found.weights[weight].dtype):
            if weight in found.scales:
                found.add(tensor, f"{weight!r} has two scales, {found.scales[weight].name!r} and {name!r}")
            found.scales[weight] = tensor
        elif weight not in found.shards.unreadable and found.shards.complete:
            found.add(tensor, f"scale {name!r} belongs to no quantized weight; unexpected tensor")


def _check_names(found: CheckedCheckpoint, with_mtp: bool) -> None:
    listing, unreadable = found.shards.listing, found.shards.unreadable
    path = found.directory / listing
    names = {name for name in found.weights if not name.startswith(MTP)}
    if not names & set(found.shapes) and not unreadable:
        example = min(names, default="no tensors at all")
        message = f"none of the {len(found.shapes)} DeepSeek-V4 tensors is here (found {example!r}); wrong format?"
        found.problems.append(Problem(listing, None, f"{found.directory}: {message}"))
        return
    missing = [name for name in found.shapes if name not in names and name not in unreadable]
    for name in _without_experts(found, missing, path):
        message = f"{path}: tensor {name!r} missing; config.json asks for it, fetch a complete checkpoint"
        found.problems.append(Problem(listing, name, message))
    for name in sorted(names - set(found.shapes)):
        tensor = found.weights[name]
        found.add(tensor, f"tensor {name!r} unexpected; the config and the weights do not agree")
    if with_mtp:
        _check_mtp(found, path)


def _without_experts(found: CheckedCheckpoint, missing: Sequence[str], path: Path) -> list[str]:
    """Report missing routed experts, one problem a layer, and return the other missing names."""
    others: list[str] = []
    experts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in missing:
        layer = OFFICIAL_LAYER.fullmatch(name)
        expert = OFFICIAL_EXPERT.fullmatch(layer[2]) if layer else None
        if layer and expert:
            experts[f"layers.{layer[1]}"].append((int(expert[1]), name))
        else:
            others.append(name)
    for layer, gone in experts.items():
        _missing_experts(found, layer, gone, path)
    return others


def _missing_experts(found: CheckedCheckpoint, block: str, gone: list[tuple[int, str]], path: Path) -> None:
    numbers = sorted({number for number, _ in gone})
    which = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    first = gone[0][1]
    found.problems.append(
        Problem(
            path.name,
            first,
            f"{path}: {block} lacks {len(gone)} tensors of routed experts {which} (tensor {first!r} missing); "
            "fetch the shard that holds them",
        )
    )


def _check_mtp(found: CheckedCheckpoint, path: Path) -> None:
    assert found.config is not None
    wanted, blocks = found.config["num_nextn_predict_layers"], defaultdict(set)
    for name in found.mtp_names:
        block, rest = block_of(name)
        expert = OFFICIAL_EXPERT.fullmatch(rest)
        blocks[block].add((int(expert[1]), expert[2]) if expert else None)
    if found.mtp == "drafter":
        found.notes.append(
            f"mtp.: a drafter of {len(blocks)} blocks without enorm and hnorm, not multi-token prediction; the policy "
            "leaves it out"
        )
    elif len(blocks) != wanted and not any(name.startswith(MTP) for name in found.shards.unreadable):
        message = (
            f"config.json: num_nextn_predict_layers is {wanted}, but the checkpoint has {len(blocks)} mtp. blocks; set "
            f"it to {len(blocks)}, or fetch the missing tensors"
        )
        found.problems.append(Problem("config.json", None, f"{found.directory}/{message}"))
    everyone = {(e, part) for e in range(found.config["n_routed_experts"]) for part in EXPERT_PARTS}
    for block, experts in blocks.items():
        names = [(e, f"{block}.ffn.experts.{e}.{part}.weight") for e, part in sorted(everyone - experts)]
        gone = [(e, name) for e, name in names if name not in found.shards.unreadable]
        if gone and experts - {None}:
            _missing_experts(found, block, gone, path)


def _check_forms(found: CheckedCheckpoint) -> None:
    """The formats against each other and against config.json."""
    assert found.config is not None
    quantization = found.config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        found.config["quantization_config"] = None
        message = f"config.json: quantization_config is {quantization!r}; wanted an object"
        found.problems.append(Problem("config.json", None, f"{found.directory}/{message}"))
    quantized = [t for name, t in found.weights.items() if is_quantized(t.dtype) and not name.startswith(MTP)]
    if quantized and not quantization:
        found.add(
            quantized[0],
            f"{quantized[0].name!r} and {len(quantized) - 1} more are quantized, but config.json has no "
            "quantization_config; engines would read codes as numbers",
        )
    narrow = [t for name, t in found.weights.items() if t.dtype in _HALVES and stored_kind(name, t.dtype) == "fp32"]
    if narrow:
        found.notes.append(
            f"{len(narrow)} tensors that a release keeps in float32, such as {narrow[0].name!r}, are stored in "
            f"{str(narrow[0].dtype).removeprefix('torch.')}; they are read as they are, with what rounding has left"
        )
    if not quantized and quantization:
        found.notes.append("config.json has a quantization_config, but no tensor is quantized; engines may refuse it")
    per_block: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in found.weights.items():
        block, rest = block_of(name)
        if OFFICIAL_EXPERT.fullmatch(rest):
            form = "FP4" if tensor.dtype in _PACKED else "FP8" if is_quantized(tensor.dtype) else str(tensor.dtype)
            per_block[block].setdefault(form, tensor)
    for block, forms in per_block.items():
        if len(forms) > 1:
            tensor = list(forms.values())[1]
            found.add(tensor, f"routed experts of {block} are stored as {' and '.join(forms)}; wanted one format")
    forms = {form for name, own in per_block.items() if not name.startswith(MTP) for form in own}
    said = found.config.get("expert_dtype")
    if len(forms) == 1 and isinstance(said, str) and forms != {said.upper()} and forms <= {"FP4", "FP8"}:
        is_now = min(forms)
        found.notes.append(
            f"config.json: expert_dtype is {said!r}, but the routed experts are {is_now}; the tensors decide here, an "
            f"engine may need expert_dtype {is_now.lower()!r}"
        )


def _check_tensor(found: CheckedCheckpoint, name: str, tensor: StoredTensor, unscaled_fp8: Collection[str]) -> None:
    kind, packed = stored_kind(name, tensor.dtype), tensor.dtype in _PACKED
    config = found.config or {}
    half = str(config.get("torch_dtype") or config.get("dtype")).removeprefix("torch.") == "float16"
    floats = (torch.float32, torch.bfloat16, *((torch.float16,) if half else ()))
    allowed = {"integer": _INTEGERS, "fp32": floats, "bf16": floats}.get(kind, (*floats, torch.float8_e4m3fn))
    if tensor.dtype not in allowed and not (packed and kind == "expert.weight"):
        found.add(tensor, f"{name!r} is {tensor.dtype}; wanted one of {', '.join(map(str, allowed))}")
        return
    shape = found.shapes.get(name)
    if shape is not None:
        wanted = (shape[0], shape[1] // 2) if packed else shape
        if tensor.shape != wanted:
            found.add(tensor, f"{name!r} is {list(tensor.shape)}; config.json wants {list(wanted)}")
            return
    elif name in found.shapes or not is_quantized(tensor.dtype):
        return
    else:
        if len(tensor.shape) != 2:
            found.add(tensor, f"{name!r} is {tensor.dtype} {list(tensor.shape)}; wanted a matrix")
            return
        shape = (tensor.shape[0], tensor.shape[1] * (2 if packed else 1))
    if is_quantized(tensor.dtype):
        _check_scale(found, name, tensor, shape, unscaled_fp8)


def _check_scale(
    found: CheckedCheckpoint, name: str, tensor: StoredTensor, shape: tuple[int, ...], unscaled_fp8: Collection[str]
) -> None:
    packed, scale = tensor.dtype in _PACKED, found.scales.get(name)
    if scale is None:
        stem = name.removesuffix(".weight")
        expected = {f"{stem}{suffix}" for suffix in SCALE_SUFFIXES}
        if expected & found.shards.unreadable or not found.shards.complete:
            return
        if packed or not is_listed(name, unscaled_fp8):
            found.add(
                tensor,
                f"{name!r} is {'FP4' if packed else 'FP8'} without a scale (looked for {', '.join(SCALE_SUFFIXES)}); "
                "its codes mean nothing alone, fetch a complete checkpoint",
            )
        return
    grid = scale_grid(shape, (1, 32) if packed else (128, 128))
    if scale.dtype not in _SCALE_DTYPES or scale.shape != grid:
        found.add(
            scale,
            f"scale {scale.name!r} is {scale.dtype} {list(scale.shape)}; wanted float32 or E8M0 bytes {list(grid)}",
        )
