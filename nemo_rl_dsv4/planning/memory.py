"""Bytes on one GPU by part and phase. Every function is one formula; sizes come from the laid-out model.

A step of a colocated run has four phases on the same GPU: the engine generates, the trainer scores, the trainer trains,
and weights go from trainer to engine (refit). What is on the GPU in each follows NeMo-RL's order: optimizer state
leaves before a refit, everything of the trainer before generation. An engine is there in all four, unless it sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.planning.forward import BlockMemory
from nemo_rl_dsv4.planning.layout import Layout

FLOAT32 = 4
ADAM_MOMENTS = 2
DEEPEP_CHANNELS = 10
"""DeepEP's default 20 multiprocessors are 10 channels."""
DEEPEP_CHUNKS = {2: (256, 128), 4: (256, 128), 8: (256, 128), 16: (288, 128), 24: (288, 128), 32: (288, 128)}
DEEPEP_CHUNKS |= {64: (288, 128), 128: (560, 128), 144: (720, 128), 160: (720, 128)}
"""Ranks -> tokens that DeepEP's dispatch receives at once over NVLink and over RDMA, from its `get_dispatch_config`."""


@dataclass(frozen=True)
class Part:
    """Bytes of one thing in one phase; `keys` are recipe keys that make it smaller."""

    name: str
    bytes: int
    keys: tuple[str, ...] = ()


def weight_bytes(layout: Layout) -> int:
    """Master weights and buffers of this rank: its shards in the master dtype (float32)."""
    return sum(placement.local_bytes for placement in layout.placements) + layout.buffer_bytes


def gradient_bytes(layout: Layout) -> int:
    """Gradients of this rank's shards, in the dtype of the weights; frozen parameters have none."""
    return sum(placement.local_bytes for placement in layout.placements if placement.trainable)


def optimizer_bytes(layout: Layout) -> int:
    """AdamW: two float32 moments for each trainable element of this rank, and a float32 step count a parameter."""
    trainable = [placement for placement in layout.placements if placement.trainable]
    return sum(placement.local_numel * FLOAT32 * ADAM_MOMENTS + FLOAT32 for placement in trainable)


def gradient_buffer_bytes(layout: Layout) -> int:
    """Whole gradients of the unit that is being reduced and of the next one, in FSDP's reduce dtype (float32)."""
    largest = sorted((unit.trainable_numel for unit in layout.units), reverse=True)[:2]
    return sum(largest) * FLOAT32


def activation_bytes(blocks: tuple[BlockMemory, ...], *, checkpointing: bool) -> int:
    """What a micro batch's blocks keep for the backward pass, and the largest block's own work on top.

    With checkpointing each block keeps its input and is run once more when its turn comes; without, each keeps all it
    saved, and the block at work adds what it needs beyond that.
    """
    if checkpointing:
        return sum(block.input * block.count for block in blocks) + max(block.peak for block in blocks)
    return sum(block.saved * block.count for block in blocks) + max(block.peak - block.saved for block in blocks)


def scoring_bytes(blocks: tuple[BlockMemory, ...]) -> int:
    """Activations of a forward pass without gradients: one block's input and its work."""
    return max(block.input + block.forward_peak for block in blocks)


def logits_bytes(positions: int, vocabulary: int, chunk: int | None, *, training: bool) -> int:
    """Logits over the vocabulary on this rank: float32, with their gradient in training.

    Args:
        positions: rows times local tokens of the micro batch.
        vocabulary: entries of the head.
        chunk: positions whose logits exist at once (`policy.logprob_chunk_size`), None for all.
        training: a forward and backward pass; scoring keeps one copy.
    """
    at_once = positions if chunk is None else min(chunk, positions)
    return at_once * vocabulary * FLOAT32 * (2 if training else 1)


def rounded_weight_bytes(layout: Layout, *, rounds: bool) -> int:
    """Rounded copies of this rank's quantized weights: one byte an element, and one float32 scale a 128x128 block."""
    if not rounds:
        return 0
    quantized = [p for p in layout.placements if p.kind in ("experts", "shared experts") or _is_rounded(p.name)]
    return sum(p.local_numel + p.local_numel // (128 * 128) * FLOAT32 for p in quantized)


def _is_rounded(name: str) -> bool:
    return (
        any(f".self_attn.{part}." in name for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
        or ".indexer.wq_b." in name
    )


def dispatch_bytes(dispatcher: str, ranks: int, tokens: int, hidden: int, *, gpus_per_node: int = 8) -> int:
    """Communication buffers of the dispatcher.

    `deepep`: the leading terms of DeepEP's `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint`: channels x peers
    x tokens received at once x bytes of a BF16 token, for NVLink peers, and twice (out and in) for nodes over RDMA.
    `hybridep`: one BF16 token buffer in and out for every rank of the NVLink domain. `uccl_ep` as `deepep`.
    `torch` has none; what it gathers is among the activations.
    """
    if dispatcher == "torch" or ranks == 1:
        return 0
    token = hidden * 2
    if dispatcher == "hybridep":
        return 2 * min(ranks, gpus_per_node) * tokens * token
    nvlink, rdma = DEEPEP_CHUNKS.get(ranks, (720, 128))
    peers, nodes = min(ranks, gpus_per_node), max(ranks // gpus_per_node, 1)
    between = DEEPEP_CHANNELS * nodes * rdma * token * 2 if nodes > 1 else 0
    return DEEPEP_CHANNELS * peers * nvlink * token + between


def gathered_tensor_bytes(layout: Layout, dtype: torch.dtype = torch.bfloat16) -> int:
    """The largest tensor that a refit makes whole on every rank before it is rounded; experts go one at a time."""
    sizes = [p.numel // p.shape[0] if p.kind == "experts" else p.numel for p in layout.placements]
    return max(sizes) * dtype.itemsize


def parts_total(parts: Mapping[str, list[Part]]) -> dict[str, int]:
    """Phase -> sum of its parts."""
    return {phase: sum(part.bytes for part in entries) for phase, entries in parts.items()}
