"""What a tensor of a checkpoint is, by its name: its class, the block it belongs to, and how a release stores it."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from nemo_rl_dsv4.model.official_names import (
    LAYER_INDEX,
    LAYER_ROWS,
    MODEL_INDEX,
    MODEL_ROWS,
    OFFICIAL_EXPERT,
    Kind,
)
from nemo_rl_dsv4.model.stored_weight import is_quantized

MTP = "mtp."
SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")
UNSCALED_FP8 = ("mtp.*.e_proj", "mtp.*.h_proj")
"""Modules whose FP8 weights public checkpoints store without a scale: their codes are the values."""

_BLOCK = re.compile(r"((?:layers|mtp)\.\d+)\.(.+)")
_CLASSES = (
    (re.compile(r"ffn\.experts\..+"), "routed experts"),
    (re.compile(r"ffn\.shared_experts\..+"), "shared experts"),
    (re.compile(r"ffn\.gate\..+"), "router"),
    (re.compile(r"attn\.indexer\.compressor\..+"), "indexer compressor"),
    (re.compile(r"attn\.indexer\..+"), "indexer"),
    (re.compile(r"attn\.compressor\..+"), "compressor"),
    (re.compile(r"attn\.attn_sink|.*hc_.+"), "hyper-connections and sinks"),
    (re.compile(r".*norm\.weight"), "norms"),
    (re.compile(r"attn\..+"), "attention"),
)


def block_of(name: str) -> tuple[str, str]:
    """Split `layers.3.attn.wq_a.weight` into `layers.3` and the rest; a tensor outside blocks has the block ""."""
    match = _BLOCK.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


def is_listed(weight: str, patterns: Collection[str]) -> bool:
    """Whether a weight, or its module, is in a list of names in which `*` stands for one part."""
    module = weight.removesuffix(".weight")
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name)
        for pattern in patterns
        for name in (weight, module)
    )


def stored_kind(name: str, dtype: torch.dtype) -> Kind:
    """Return how a release stores this tensor; names that only `mtp.` blocks have go by their dtype."""
    block, rest = block_of(name)
    if not block and name in MODEL_INDEX:
        return MODEL_ROWS[MODEL_INDEX[name]].kind
    if block and rest in LAYER_INDEX:
        return LAYER_ROWS[LAYER_INDEX[rest]].kind
    if block and OFFICIAL_EXPERT.fullmatch(rest):
        return "expert.weight"
    if is_quantized(dtype):
        return "linear.weight"
    if not dtype.is_floating_point:
        return "integer"
    return "fp32" if dtype == torch.float32 else "bf16"


def tensor_class(name: str) -> str:
    """Return a plain word for a tensor's part of the model, such as "routed experts"; `mtp.` blocks are one class."""
    block, rest = block_of(name)
    if block.startswith(MTP):
        return "mtp"
    if not block:
        return {"embed.weight": "embedding", "head.weight": "head"}.get(name, "norms and head mixing")
    return next((word for pattern, word in _CLASSES if pattern.fullmatch(rest)), "other")
