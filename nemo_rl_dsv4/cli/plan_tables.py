"""A plan as tables for a person, and as one object for a program."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.topology import mesh_axes, ranks, sequence_multiple
from nemo_rl_dsv4.planning.hardware import GIB
from nemo_rl_dsv4.planning.layout import Placement
from nemo_rl_dsv4.planning.plan import Plan


def as_document(plan: Plan, gpu: str | None) -> dict[str, Any]:
    """The plan as plain data; sizes in bytes."""
    forward = plan.forward
    return {
        "fits": not plan.findings,
        "findings": plan.findings,
        "gpu": {"name": gpu, "bytes": plan.gpu},
        "ranks": {"world": plan.sizes.world, "dp_shard": plan.sizes.dp, "cp": plan.sizes.cp, "ep": plan.sizes.ep},
        "row_length": plan.row_length,
        "host_bytes_of_a_sleeping_rank": plan.sleeping_bytes,
        "parameters": plan.layout.parameters,
        "active_parameters": plan.layout.active_parameters(plan.hf_config["num_experts_per_tok"]),
        "placements": [
            {"class": kind, "parameters": count, "numel": numel, "local_bytes": size, "example": example}
            for kind, count, numel, size, example in _classes(plan)
        ],
        "forward": {
            "ids": list(forward.ids_shape),
            "hidden": list(forward.hidden_shape),
            "logits": list(forward.logits_shape),
            "logits_dtype": forward.logits_dtype,
            "blocks": forward.blocks_run,
            "block_kinds": [vars(block) for block in forward.blocks],
        },
        "memory": {phase: {part.name: part.bytes for part in parts} for phase, parts in plan.phases.items()},
        "totals": plan.totals,
        "engine": None if plan.engine is None else {**vars(plan.engine), "tokens_held": plan.engine.tokens_held},
        "traffic": [vars(kind) for kind in plan.traffic],
        "passes": vars(plan.passes),
    }


def print_plan(plan: Plan, config: MasterConfig, gpu: str | None, console: Console) -> None:
    """Prints ranks, placements, the forward check, memory, traffic and findings."""
    blocks = (
        (_ranks_title(config), _ranks(config)),
        ("Parameters (whole -> on each rank)", _placements(plan)),
        ("Forward pass on shapes", _forward(plan)),
        (f"Memory of one GPU in GiB{'' if plan.gpu is None else f' (of {plan.gpu / GIB:.1f}, {gpu})'}", _memory(plan)),
        ("Sent by one GPU in one step, in GB", _traffic(plan)),
    )
    for title, table in blocks:
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()
    console.print(Text(_rows(plan, config)), soft_wrap=True)
    if plan.sleeping_bytes:
        rank, node = plan.sleeping_bytes / GIB, plan.sleeping_bytes * config.cluster.gpus_per_node / GIB
        said = f"Host memory while engines generate: {rank:.1f} GiB a rank, {node:.1f} GiB a node, pinned"
        console.print(Text(said), soft_wrap=True)
    engine = plan.engine
    if engine is not None:
        console.print(
            Text(
                f"KV pool: {max(engine.kv_pool, 0) / GIB:.1f} GiB hold {engine.tokens_held:,} tokens; "
                f"{engine.sequences_per_engine} sequences an engine ask for at most {engine.tokens_wanted:,}"
            ),
            soft_wrap=True,
        )
    if plan.gpu is None:
        console.print("No GPU named (policy.dsv4.gpu, or --gpu): sizes are not compared with a limit.")
    for finding in plan.findings:
        console.print(Text(f"does not fit: {finding}", style="red"), soft_wrap=True)
    if not plan.findings and plan.gpu is not None:
        worst = max(plan.totals, key=lambda phase: plan.totals[phase])
        free = (plan.gpu - plan.totals[worst]) / GIB
        console.print(Text(f"fits: {worst} needs most and leaves {free:.1f} GiB", style="green"), soft_wrap=True)


def _ranks_title(config: MasterConfig) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in mesh_axes(config).items() if size > 1)
    return f"Ranks: {config.world_size} ({axes or 'one'}); ep_shard x ep views dp x cp once more"


def _ranks(config: MasterConfig) -> Table:
    """First and last rank of every node, at most eight nodes."""
    table = Table()
    for name in ("node", "ranks", "dp", "cp", "ep_shard", "ep"):
        table.add_column(name, justify="right")
    nodes: dict[int, list[Any]] = defaultdict(list)
    for rank in ranks(config):
        nodes[rank.node].append(rank)
    shown = list(nodes) if len(nodes) <= 8 else [*list(nodes)[:6], None, list(nodes)[-1]]
    for node in shown:
        if node is None:
            table.add_row(*["..."] * 6)
            continue
        group = nodes[node]
        spans = [_span([getattr(rank, axis) for rank in group]) for axis in ("rank", "dp", "cp", "ep_shard", "ep")]
        table.add_row(str(node), *spans)
    return table


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _classes(plan: Plan) -> list[tuple[str, int, int, int, str]]:
    """(class, parameters, elements, local bytes, the largest parameter as an example), in the model's order."""
    groups: dict[str, list[Placement]] = defaultdict(list)
    for placement in plan.layout.placements:
        groups[placement.kind].append(placement)
    rows = []
    for kind, members in groups.items():
        largest = max(members, key=lambda member: member.numel)
        example = f"{_shape(largest.shape)} -> {_shape(largest.local_shape)}; {largest.sharding}"
        rows.append((kind, len(members), sum(m.numel for m in members), sum(m.local_bytes for m in members), example))
    return rows


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _placements(plan: Plan) -> Table:
    table = Table()
    table.add_column("class", no_wrap=True)
    for name in ("tensors", "elements", "GiB a rank"):
        table.add_column(name, justify="right")
    table.add_column("largest, and how it is cut", overflow="fold")
    for kind, count, numel, size, example in _classes(plan):
        table.add_row(kind, str(count), f"{numel / 1e6:,.1f} M", f"{size / GIB:.3f}", example)
    active = plan.layout.active_parameters(plan.hf_config["num_experts_per_tok"])
    total = sum(placement.local_bytes for placement in plan.layout.placements)
    table.add_row(
        "all",
        str(len(plan.layout.placements)),
        f"{plan.layout.parameters / 1e9:,.2f} B",
        f"{total / GIB:.3f}",
        f"{active / 1e9:,.2f} B used by a token",
        style="bold",
    )
    return table


def _forward(plan: Plan) -> Table:
    forward = plan.forward
    table = Table()
    table.add_column("block", no_wrap=True)
    for name in ("blocks", "input MiB", "saved MiB", "peak MiB"):
        table.add_column(name, justify="right")
    for block in forward.blocks:
        sizes = (block.input, block.saved, block.peak)
        table.add_row(block.kind, str(block.count), *(f"{size / 1024**2:,.1f}" for size in sizes))
    table.caption = (
        f"{forward.blocks_run} blocks ran: ids {_shape(forward.ids_shape)}, hidden {_shape(forward.hidden_shape)}, "
        f"logits {_shape(forward.logits_shape)} {forward.logits_dtype}"
    )
    return table


def _memory(plan: Plan) -> Table:
    table = Table()
    table.add_column("part", no_wrap=True)
    for phase in plan.phases:
        table.add_column(phase, justify="right")
    names = list(dict.fromkeys(part.name for parts in plan.phases.values() for part in parts))
    sizes = {phase: {part.name: part.bytes for part in parts} for phase, parts in plan.phases.items()}
    for name in names:
        cells = [sizes[phase].get(name) for phase in plan.phases]
        table.add_row(name, *("" if size is None else f"{size / GIB:.2f}" for size in cells))
    table.add_row("total", *(f"{total / GIB:.2f}" for total in plan.totals.values()), style="bold")
    return table


def _rows(plan: Plan, config: MasterConfig) -> str:
    """Which rows the activations are those of, and whether others need less."""
    length = config.policy.max_total_sequence_length
    padded = f", padded to {plan.row_length}" if plan.row_length != length else ""
    if config.policy.sequence_packing.enabled:
        others = "packing fills them with shorter ones"
    elif sequence_multiple(config) >= length:
        others = "shorter rows are padded to as much"
    else:
        others = "shorter rows need less"
    return f"Activations: rows of max_total_sequence_length {length}{padded}; {others}"


def _traffic(plan: Plan) -> Table:
    table = Table()
    table.add_column("kind", no_wrap=True)
    table.add_column("sent", justify="right")
    table.add_column("of it between nodes", justify="right")
    for kind in plan.traffic:
        table.add_row(kind.kind, f"{kind.sent / 1e9:,.2f}", f"{kind.between_nodes / 1e9:,.2f}")
    table.caption = f"{plan.passes.training} training and {plan.passes.scoring} scoring passes a rank and step"
    return table
