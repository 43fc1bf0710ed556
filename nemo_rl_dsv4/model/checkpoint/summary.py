"""What a checkpoint is, for a reader: architecture, layer kinds, formats by class of tensor, sizes, problems."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint
from nemo_rl_dsv4.model.checkpoint.classes import MTP, SCALE_SUFFIXES, tensor_class
from nemo_rl_dsv4.model.hf_config import LAYER_TYPES
from nemo_rl_dsv4.model.safetensors_file import DTYPES, StoredTensor
from nemo_rl_dsv4.model.stored_weight import is_quantized

_SHORT = {dtype: name for name, dtype in DTYPES.items()}
_ARCHITECTURE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
    "num_nextn_predict_layers",
)


@dataclass
class FormatRow:
    """Tensors of one class in one format; `parameters` counts numbers, not bytes, and leaves scales out."""

    tensor_class: str
    format: str
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0


@dataclass
class Summary:
    """Everything that `nemo-rl-dsv4 inspect` shows, as plain values.

    Attributes:
        form: the checkpoint in a few words, such as "FP4 routed experts, FP8 128x128 elsewhere".
        architecture: sizes of config.json.
        layer_kinds: number of layers of each kind.
        formats: tensors by class and format.
        largest_group_bytes: stored bytes of the largest tensor or expert stack of one layer.
        deep: whether values were read.
    """

    directory: str
    form: str
    architecture: dict[str, Any]
    layer_kinds: dict[str, int]
    formats: list[FormatRow]
    files: int
    bytes: int
    parameters: int
    largest_group_bytes: int
    mtp: str
    deep: bool
    notes: list[str] = field(default_factory=list)
    problems: list[dict[str, str | None]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def summarize(checked: CheckedCheckpoint, *, deep: bool = False) -> Summary:
    """Summarize what `check_checkpoint` found; `deep` says whether values were read as well."""
    rows: dict[tuple[str, str], FormatRow] = {}
    groups: Counter[str] = Counter()
    for name, tensor in checked.weights.items():
        scale = checked.scales.get(name)
        word, form = tensor_class(name), tensor_format(tensor, scale)
        row = rows.setdefault((word, form), FormatRow(word, form))
        size = tensor.bytes + (0 if scale is None else scale.bytes)
        row.tensors += 1
        row.parameters += parameters_of(tensor)
        row.bytes += size
        groups[group_of(name)] += size
    config = checked.config or {}
    return Summary(
        directory=str(checked.directory),
        form=_form(checked),
        architecture={
            "architectures": config.get("architectures"),
            "model_type": config.get("model_type"),
            **{key: config[key] for key in _ARCHITECTURE if key in config},
        },
        layer_kinds=_layer_kinds(config) if checked.config else {},
        formats=sorted(rows.values(), key=lambda row: -row.bytes),
        files=len(checked.shards.files),
        bytes=checked.shards.bytes,
        parameters=sum(row.parameters for row in rows.values()),
        largest_group_bytes=max(groups.values(), default=0),
        mtp=checked.mtp,
        deep=deep,
        notes=list(checked.notes),
        problems=[problem.to_dict() for problem in checked.problems],
    )


def group_of(name: str) -> str:
    """Return the tensor group of a weight: all routed experts of a layer together, else the tensor itself."""
    before, experts, _ = name.partition(".ffn.experts.")
    return before + experts if experts else name


def parameters_of(tensor: StoredTensor) -> int:
    """Return how many numbers a stored weight holds; FP4 has two a byte."""
    return math.prod(tensor.shape) * (2 if tensor.dtype in (torch.int8, torch.uint8) else 1)


def tensor_format(tensor: StoredTensor, scale: StoredTensor | None) -> str:
    """Return a stored weight's format in words, such as "FP4 1x32, scale E8M0 .scale"."""
    if not is_quantized(tensor.dtype):
        return _SHORT[tensor.dtype]
    form = "FP4 1x32" if tensor.dtype in (torch.int8, torch.uint8) else "FP8 128x128"
    if scale is None:
        return f"{form.split()[0]} without scale"
    suffix = next(s for s in SCALE_SUFFIXES if scale.name.endswith(s))
    kind = "E8M0" if scale.dtype in (torch.float8_e8m0fnu, torch.uint8) else _SHORT[scale.dtype]
    return f"{form}, scale {kind} {suffix}"


def _form(checked: CheckedCheckpoint) -> str:
    seen: dict[str, set[str]] = defaultdict(set)
    for name, tensor in checked.weights.items():
        if name.startswith(MTP):
            continue
        word = "routed experts" if tensor_class(name) == "routed experts" else "elsewhere"
        if is_quantized(tensor.dtype):
            seen[word].add(tensor_format(tensor, None).split()[0])
        elif word == "routed experts":
            seen[word].add(_SHORT[tensor.dtype])
    experts, other = ("/".join(sorted(seen[word])) for word in ("routed experts", "elsewhere"))
    if not experts and not other:
        return "no DeepSeek-V4 weights"
    if not other:
        return f"{experts} throughout"
    return f"{experts} routed experts, {other} projections"


def _layer_kinds(config: dict[str, Any]) -> dict[str, int]:
    layers = config["num_hidden_layers"]
    kinds = Counter(LAYER_TYPES[ratio] for ratio in config["compress_ratios"][:layers])
    return {**kinds, "of these hash-routed": config["num_hash_layers"]}
