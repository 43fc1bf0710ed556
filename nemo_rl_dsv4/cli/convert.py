"""`nemo-rl-dsv4 convert SRC DST --to bf16|fp8`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.errors import UserError

if TYPE_CHECKING:
    from nemo_rl_dsv4.model.checkpoint.convert import ConvertReport

HELP = (
    "Write a checkpoint, or the weights of a training checkpoint, in BF16 or FP8; exit 1, with nothing written, if FP8 "
    "cannot hold its FP4 weights."
)
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 convert DeepSeek-V4-Flash flash-fp8 --to fp8        FP4 experts to FP8, same values\n"
    "  nemo-rl-dsv4 convert DeepSeek-V4-Flash flash-bf16 --to bf16\n"
    "  nemo-rl-dsv4 convert results/grpo/exp_001/step_20 served --to fp8   what the rollout had after step 20\n"
    "  nemo-rl-dsv4 convert results/grpo/exp_001 served --to bf16          a run's last whole checkpoint\n\n"
    "An interrupted conversion continues when the same command is given again."
)
SHOWN = 20
MIN_SHARD_GB, MAX_SHARD_GB = 1e-6, 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "source_folder", metavar="SRC", help="checkpoint folder, a run's step_N folder, or a run's folder"
    )
    parser.add_argument("destination", metavar="DST", help="folder to make; must not exist")
    parser.add_argument("--to", choices=("bf16", "fp8"), required=True, help="format of the projections and experts")
    parser.add_argument(
        "--allow-lossy", action="store_true", help="quantize anew, with a loss, FP4 weights that FP8 cannot hold"
    )
    parser.add_argument(
        "--source", metavar="DIR", help="training checkpoints: where the checkpoint that the run started from is now"
    )
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a shard (default 5)")


def run(options: argparse.Namespace) -> int:
    """Converts, verifies what was written, and says what became of the weights."""
    from rich.console import Console

    from nemo_rl_dsv4.cli.training_source import find_step
    from nemo_rl_dsv4.model.checkpoint.convert import convert_checkpoint
    from nemo_rl_dsv4.utils.progress import start_phase

    if not MIN_SHARD_GB <= options.shard_gb <= MAX_SHARD_GB:
        raise UserError(f"--shard-gb is {options.shard_gb}; wanted gigabytes from {MIN_SHARD_GB:g} to {MAX_SHARD_GB:g}")
    display = None
    read = 0

    def begin(total: int) -> None:
        nonlocal display
        display = start_phase(Console(stderr=True), f"converting to {options.to} (MiB)", max(1, total >> 20))

    def advance(size: int) -> None:
        nonlocal read
        before, read = read >> 20, read + size
        if display is not None:
            display.advance((read >> 20) - before)

    source, destination = Path(options.source_folder), Path(options.destination)
    size = int(options.shard_gb * 1e9)
    try:
        step = find_step(source, Console(stderr=True))
        if step is not None:
            from nemo_rl_dsv4.grpo.checkpoint_files import POLICY
            from nemo_rl_dsv4.policy.export_checkpoint import export_checkpoint

            _refuse(options.allow_lossy, "--allow-lossy", "a checkpoint with FP4 weights")
            report = export_checkpoint(
                step / POLICY,
                destination,
                options.to,
                source=Path(options.source) if options.source else None,
                max_shard_bytes=size,
                on_plan=begin,
                advance=advance,
            )
        else:
            _refuse(options.source, "--source", "a training checkpoint")
            report = convert_checkpoint(
                source,
                destination,
                options.to,
                allow_lossy=options.allow_lossy,
                max_shard_bytes=size,
                on_plan=begin,
                advance=advance,
            )
    finally:
        if display is not None:
            display.stop()
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        print_report(report)
    return OK if report.written else FINDING


def _refuse(given: object, option: str, only_for: str) -> None:
    if given:
        raise UserError(f"{option} is for {only_for}; leave it out")


def print_report(report: ConvertReport) -> None:
    """Prints a report as text."""
    for name, error in list(report.lossy.items())[:SHOWN]:
        print(f"{name}: " + ("FP8 cannot hold its FP4 scales" if error is None else f"relative error {error:.3g}"))
    if len(report.lossy) > SHOWN:
        print(f"and {len(report.lossy) - SHOWN} more; --json lists all")
    if not report.written:
        print(
            f"nothing written: {len(report.lossy)} FP4 weights have scales more than 2^14 apart in one 128x128 tile; "
            "--allow-lossy quantizes them anew, --to bf16 keeps every value"
        )
        return
    for action, count in sorted(report.actions.items()):
        error = report.errors.get(action)
        print(f"{count:>8,} {action}" + (f", relative error up to {error:.3g}" if error else ""))
    if report.dropped:
        print(f"{report.dropped:>8,} mtp. weights left out (num_nextn_predict_layers is 0)")
    for note in report.notes:
        print(f"note: {note}")
    kept = f", {report.resumed} of them from before" if report.resumed else ""
    print(
        f"{report.destination}: {report.bytes / 2**30:,.3f} GiB in {report.shards} shards{kept}, read back and "
        f"compared, {report.seconds:.1f} s"
    )
