"""Bytes that one GPU sends in one training step, by kind. Rings: all-gather and reduce-scatter send (n - 1) / n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

from nemo_rl_dsv4.planning.layout import Layout

BF16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Passes:
    """How often one rank runs the model in a step."""

    training: int
    scoring: int
    recomputes: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind that a rank sends in a step; `between_nodes` is the part that leaves its node."""

    kind: str
    sent: int
    between_nodes: int


def share_outside_node(ranks: int, gpus_per_node: int, stride: int = 1) -> float:
    """Share of a ring's hops that leave a node: groups of `ranks` whose members are `stride` apart."""
    here = max(min(gpus_per_node // stride, ranks), 1)
    return 0.0 if here >= ranks else 1 / here


def fsdp_traffic(layout: Layout, passes: Passes, gpus_per_node: int) -> list[Traffic]:
    """All-gathers of every unit in the compute dtype for each pass, and one float32 reduce-scatter a training pass.

    A unit that stays gathered is gathered once a pass; one that does not, once more for the backward pass.
    """
    gathers = scatters = 0.0
    for unit in layout.units:
        share = (unit.ranks - 1) / unit.ranks
        again = 0 if unit.stays_gathered else 1
        gathers += unit.gathered_bytes * share * (passes.scoring + passes.training * (1 + again))
        scatters += unit.trainable_numel * FLOAT32 * share * passes.training
    ranks = max((unit.ranks for unit in layout.units), default=1)
    outside = share_outside_node(ranks, gpus_per_node)
    return [
        Traffic("FSDP all-gather", int(gathers), int(gathers * outside)),
        Traffic("FSDP reduce-scatter", int(scatters), int(scatters * outside)),
    ]


def distinct_groups(groups: int, experts: int, top_k: int) -> float:
    """Expected number of groups that `top_k` of `experts` experts, chosen evenly, fall into; groups hold equally many.

    groups x (1 - C(E - E / groups, k) / C(E, k)).
    """
    inside = experts // groups
    missed = comb(experts - inside, top_k) / comb(experts, top_k) if experts - inside >= top_k else 0.0
    return groups * (1 - missed)


def expert_traffic(
    hf_config: Mapping[str, Any], passes: Passes, *, dispatcher: str, ranks: int, tokens: int, gpus_per_node: int
) -> Traffic:
    """Tokens to their experts (dispatch) and back (combine), in every layer and pass, routing balanced.

    A backward pass sends the same again both ways, a recomputation once more. Libraries send a token once to each rank
    (and once to each other node) that holds any of its experts, in BF16. `torch` gathers every token on every rank, and
    all-reduces the float32 outputs of each token's top-k experts.

    Args:
        hf_config: official-style configuration.
        passes: forward passes of a step.
        dispatcher: `backend.dispatcher`.
        ranks: expert-parallel size.
        tokens: tokens of one rank and pass.
        gpus_per_node: GPUs of a node.
    """
    if ranks == 1:
        return Traffic("expert dispatch and combine", 0, 0)
    hidden, top_k = hf_config["hidden_size"], hf_config["num_experts_per_tok"]
    rounds = passes.scoring + passes.training * (3 if passes.recomputes else 2)
    layers = hf_config["num_hidden_layers"]
    if dispatcher == "torch":
        gather = tokens * hidden * BF16 * (ranks - 1)
        reduce = 2 * (ranks - 1) * tokens * top_k * hidden * FLOAT32
        sent = layers * rounds * (gather + reduce)
        return Traffic("expert dispatch and combine", sent, int(sent * share_outside_node(ranks, gpus_per_node)))
    experts = hf_config["n_routed_experts"]
    copies = distinct_groups(ranks, experts, top_k) * (ranks - 1) / ranks
    nodes = max(ranks // gpus_per_node, 1)
    far = distinct_groups(nodes, experts, top_k) * (nodes - 1) / nodes if nodes > 1 else 0.0
    unit = layers * rounds * 2 * tokens * hidden * BF16
    return Traffic("expert dispatch and combine", int(unit * copies), int(unit * far))


def context_traffic(
    hf_config: Mapping[str, Any], passes: Passes, *, ranks: int, tokens: int, gpus_per_node: int
) -> Traffic:
    """Context-parallel gathers of keys, compressed entries and index keys in every layer, and of their gradients.

    Forward (and recomputation): an all-gather, BF16. Backward: an all-reduce of the gathered tensor's gradient, twice
    the all-gather; index keys have no gradient.
    """
    if ranks == 1:
        return Traffic("context-parallel gathers", 0, 0)
    head, index = hf_config["head_dim"], hf_config["index_head_dim"]
    forward = backward = 0.0
    for ratio in hf_config["compress_ratios"][: hf_config["num_hidden_layers"]]:
        entries = tokens * head * (1 + (1 / ratio if ratio else 0)) * BF16
        forward += entries + (tokens / ratio * index * BF16 if ratio == 4 else 0)
        backward += 2 * entries
    rounds = passes.scoring + passes.training * (2 if passes.recomputes else 1)
    sent = int((ranks - 1) * (forward * rounds + backward * passes.training))
    return Traffic("context-parallel gathers", sent, int(sent * share_outside_node(ranks, gpus_per_node)))


def refit_traffic(export_bytes: int, *, ranks: int, gpus_per_node: int) -> Traffic:
    """Every rank ends up with every exported tensor once: an all-gather of the export over all ranks."""
    sent = int(export_bytes * (ranks - 1) / ranks)
    return Traffic("refit", sent, int(sent * share_outside_node(ranks, gpus_per_node)))
