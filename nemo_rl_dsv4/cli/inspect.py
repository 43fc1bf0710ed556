"""`nemo-rl-dsv4 inspect DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_rl_dsv4.model.checkpoint.summary import Summary

HELP = "Check a checkpoint's files against each other and show what it holds; exit 1 on a problem."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 inspect DeepSeek-V4-Flash            headers, names, shapes, scales, experts, config\n"
    "  nemo-rl-dsv4 inspect DeepSeek-V4-Flash --deep     also every value: scales, NaN codes, infinities, tables"
)
SHOWN = 50
WIDTH = 120
"""Columns of the table where there is no terminal to fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="checkpoint folder")
    parser.add_argument("--deep", action="store_true", help="read every tensor and check its values")


def run(options: argparse.Namespace) -> int:
    """Prints what the folder holds and everything wrong with it."""
    from rich.console import Console

    from nemo_rl_dsv4.cli.training_source import what_training_left
    from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
    from nemo_rl_dsv4.model.checkpoint.serving import export_command
    from nemo_rl_dsv4.model.checkpoint.summary import summarize
    from nemo_rl_dsv4.model.checkpoint.values import deep_problems
    from nemo_rl_dsv4.utils.progress import progress

    directory = Path(options.directory)
    if not directory.is_dir():
        raise UserError(f"inspect: {directory} is no folder; give the folder that holds config.json")
    if (training := what_training_left(directory)) is not None:
        what, step = training
        raise UserError(
            f"inspect: {directory} {what}, in torch's distributed format; `{export_command(step)}` makes a servable one"
        )
    checked = check_checkpoint(directory, for_training=False)
    deep = options.deep and checked.config is not None
    if options.deep and not deep:
        checked.notes.append("values were not read: config.json cannot be used")
    if deep:
        megabytes = max(1, checked.shards.bytes >> 20)
        with progress(Console(stderr=True), f"reading {directory} (MiB)", megabytes) as advance:
            read = 0

            def count(size: int) -> None:
                nonlocal read
                before, read = read >> 20, read + size
                advance((read >> 20) - before)

            checked.problems += deep_problems(checked, count)
    summary = summarize(checked, deep=deep)
    if options.json:
        print(json.dumps(summary.to_dict()))
    else:
        console = Console()
        print_summary(summary, console if console.is_terminal else Console(width=WIDTH))
    return FINDING if summary.problems else OK


def print_summary(summary: Summary, console: Console) -> None:
    """Prints a summary as text."""
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(f"{summary.directory}: {summary.form}", "bold")
    line(
        f"{summary.parameters / 1e9:,.3f} B parameters, {summary.bytes / 2**30:,.3f} GiB in {summary.files} files; "
        f"largest tensor group {summary.largest_group_bytes / 2**20:,.1f} MiB"
    )
    line("config: " + ", ".join(f"{key} {value}" for key, value in summary.architecture.items()))
    line("layers: " + ", ".join(f"{count} {kind}" for kind, count in summary.layer_kinds.items()))
    line(f"multi-token prediction: {summary.mtp}")
    table = Table("class", "format")
    for title in ("tensors", "parameters", "MiB"):
        table.add_column(title, justify="right")
    for row in summary.formats:
        table.add_row(
            row.tensor_class, row.format, f"{row.tensors:,}", f"{row.parameters:,}", f"{row.bytes / 2**20:,.2f}"
        )
    console.print(table)
    for note in summary.notes:
        line(f"note: {note}")
    for problem in summary.problems[:SHOWN]:
        line(f"problem: {problem['message']}", "red")
    if len(summary.problems) > SHOWN:
        line(f"and {len(summary.problems) - SHOWN} more problems; --json lists all", "red")
    checked = "headers and values" if summary.deep else "headers (values with --deep)"
    line(f"{len(summary.problems)} problems; checked {checked}", "bold")
