"""What `--dry-run` prints: who does what, how a batch flows, and which files a run would write."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_dsv4.cli.dry_run_data import data_rows
from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY
from nemo_rl_dsv4.config.runs_here import missing_here, not_implemented
from nemo_rl_dsv4.config.runtime_choice import Runtime
from nemo_rl_dsv4.config.topology import batch_flow, mesh_axes, ranks, sequence_multiple
from nemo_rl_dsv4.utils.run_folder import checkpoint_folder, next_run_name

SHOWN_RANKS = 8


def print_dry_run(config: MasterConfig, runtime: Runtime, console: Console, resume: Path | None = None) -> None:
    """Prints the topology of a validated recipe."""
    for title, table in (
        ("Run", _overview(config, runtime)),
        ("Mesh axes (slowest first; ep_shard x ep is a second view of the same ranks)", _mesh(config)),
        (f"Ranks ({config.world_size})", _ranks(config)),
        ("One step", _flow(config)),
        ("Data", _two_columns(data_rows(config))),
        ("Files that a run would write", _files(config, resume)),
    ):
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()
    console.print("The recipe is valid. Nothing was started or written.")
    for reason in (*not_implemented(config, runtime), *missing_here(config)):
        console.print(Text(f"It cannot run here: {reason}."), soft_wrap=True)


def _two_columns(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _overview(config: MasterConfig, runtime: Runtime) -> Table:
    policy, dsv4 = config.policy, config.policy.dsv4
    rounded = [name for name, on in dsv4.fake_quant.resolved(dsv4.train_mode).items() if on]
    hardware = (
        f"{config.world_size} CPU process{'es' if config.world_size > 1 else ''}"
        if config.cluster.gpus_per_node == 0
        else f"{config.cluster.num_nodes} nodes x {config.cluster.gpus_per_node} GPUs"
    )
    if config.rollout_gpus:
        hardware += f", {config.world_size} of them for training and {config.rollout_gpus} for rollout"
    return _two_columns(
        [
            ("model", policy.model_name),
            ("runtime", f"{runtime} (runtime: {config.runtime})"),
            ("policy", f"{hardware}, {policy.precision}"),
            ("train mode", f"{dsv4.train_mode}; rounds {', '.join(rounded) or 'nothing'}"),
            ("rollout", f"{_engines(config)}, profile {dsv4.rollout_profile}"),
            ("steps", f"up to {config.grpo.max_num_steps}, at most {config.grpo.max_num_epochs} epochs"),
            ("seed", str(config.grpo.seed)),
        ],
    )


def _engines(config: MasterConfig) -> str:
    generation = config.policy.generation
    if generation.backend == "reference":
        workers = generation.reference_cfg.num_workers
        return f"reference, {workers} CPU process{'es' if workers > 1 else ''}"
    engine = generation.vllm_cfg
    return f"vllm, {engine.precision}, TP {engine.tensor_parallel_size}, EP {engine.expert_parallel_size}"


def _mesh(config: MasterConfig) -> Table:
    axes = mesh_axes(config)
    table = Table()
    for name in axes:
        table.add_column(name, justify="right")
    table.add_row(*(str(size) for size in axes.values()))
    return table


def _ranks(config: MasterConfig) -> Table:
    table = Table()
    names = ("rank", "node", "dp", "cp", "ep", "ep_shard")
    for name in names:
        table.add_column(name, justify="right")
    everyone = ranks(config)
    shown = everyone if len(everyone) <= SHOWN_RANKS else [*everyone[: SHOWN_RANKS - 2], None, everyone[-1]]
    for rank in shown:
        table.add_row(*("..." if rank is None else str(getattr(rank, name)) for name in names))
    return table


def _flow(config: MasterConfig) -> Table:
    flow, policy, grpo = batch_flow(config), config.policy, config.grpo
    generation = policy.generation
    multiple = sequence_multiple(config)
    rows = [
        (
            "rollout",
            f"{flow.prompts} prompts x {grpo.num_generations_per_prompt} responses = {flow.rollouts} sequences",
        ),
        (
            "sampling",
            f"temperature {generation.temperature}, top-p {generation.top_p}, top-k {generation.top_k or 'off'}",
        ),
        (
            "lengths",
            f"prompt up to {config.data.max_input_seq_length or policy.max_total_sequence_length}, response up to "
            f"{generation.max_new_tokens}, together up to {policy.max_total_sequence_length} tokens, padded to a "
            f"multiple of {multiple}",
        ),
        (
            "scoring",
            f"{flow.rollouts // config.data_parallel_size} sequences a data-parallel rank in {flow.scoring_passes} "
            f"passes of up to {policy.logprob_batch_size}",
        ),
        (
            "training",
            f"{flow.updates} update{'s' if flow.updates > 1 else ''} a step of {policy.train_global_batch_size} "
            f"sequences: {flow.sequences_per_rank_and_update} a data-parallel rank in {flow.micro_batches_per_update} "
            f"micro batches of up to {policy.train_micro_batch_size}",
        ),
        ("validation", _validation(config)),
    ]
    return _two_columns(rows)


def _validation(config: MasterConfig) -> str:
    grpo = config.grpo
    times = [
        *(["before the first step"] if grpo.val_at_start else []),
        *([f"every {grpo.val_period} steps"] if grpo.val_period else []),
        *(["after the last step"] if grpo.val_at_end else []),
    ]
    if not times or config.data.validation is None:
        return "off"
    return f"{grpo.max_val_samples or 'all'} problems x {grpo.val_num_generations_per_prompt}, {', '.join(times)}"


def _files(config: MasterConfig, resume: Path | None) -> Table:
    log_dir = Path(config.logger.log_dir)
    run = resume or log_dir / next_run_name(log_dir)
    rows = [
        (f"{run}/", "config.yaml, metrics.jsonl, summary.png, report.html"),
    ]
    if config.logger.tensorboard_enabled:
        rows.append((f"{run}/tensorboard/", "TensorBoard events"))
    if config.checkpointing.enabled:
        kept = config.checkpointing.keep_top_k
        what = f"a checkpoint every {config.checkpointing.save_period} steps, {f'{kept} kept' if kept else 'all kept'}"
        rows.append((f"{checkpoint_folder(config.checkpointing.checkpoint_dir, run)}/step_N/", what))
    tiny = config.policy.dsv4.tiny
    if config.policy.model_name == TINY and tiny is not None:
        rows.append((f"{tiny.cache_dir}/", "the tiny model's checkpoint and tokenizer, made once"))
    return _two_columns(rows)
