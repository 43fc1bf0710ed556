"""`nemo-rl-dsv4 verify-refit DIR [--profile P ...]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.errors import UserError

if TYPE_CHECKING:
    from nemo_rl_dsv4.refit.verify import VerifyReport

HELP = "Export an unchanged checkpoint and compare every byte with the stored one; exit 1 on a finding."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 verify-refit results/checkpoints/tiny                         every profile\n"
    "  nemo-rl-dsv4 verify-refit DeepSeek-V4-Flash --profile vllm-hopper --json   one, for a script\n\n"
    "verdicts: identical (same bytes), recoded (same values in another format, e.g. FP4 experts for an FP8 engine),\n"
    "          renormalised (same values, other bytes: a finding), changed (other values: a finding)"
)
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="checkpoint folder in release format")
    parser.add_argument(
        "--profile",
        metavar="P",
        action="append",
        help="rollout profile, may be repeated; left out: all, FP4 ones only for FP4 checkpoints",
    )


def run(options: argparse.Namespace) -> int:
    """Compares under each profile and prints a table, or one JSON object."""
    import torch
    from rich.console import Console

    from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint
    from nemo_rl_dsv4.numerics import PROFILES, QuantSpec, get_profile
    from nemo_rl_dsv4.refit.verify import verify_export
    from nemo_rl_dsv4.utils.progress import progress

    if not options.directory.is_dir():
        raise UserError(f"{options.directory}: no such folder; wanted a checkpoint with config.json and safetensors")
    checkpoint = ReleaseCheckpoint(options.directory)
    weights = list(checkpoint)
    packed = any(checkpoint.dtype(name) in (torch.int8, torch.uint8) for name in weights)
    profiles = [get_profile(name) for name in options.profile or PROFILES]
    if options.profile is None:
        profiles = [p for p in profiles if packed or (p.site("expert.weight") or QuantSpec()).fmt != "e2m1"]
    reports = []
    title = f"comparing {len(weights)} weights under {len(profiles)} profiles"
    with progress(Console(stderr=True, highlight=False), title, len(weights) * len(profiles)) as step:
        for profile in profiles:
            reports.append(verify_export(options.directory, profile, on_weight=lambda name: step(1, name)))
    if options.json:
        print(json.dumps({"directory": str(options.directory), "profiles": [report.to_dict() for report in reports]}))
    else:
        for report in reports:
            _print(report)
    return OK if all(report.ok for report in reports) else FINDING


def _print(report: VerifyReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from nemo_rl_dsv4.refit.verify import VERDICTS
    from nemo_rl_dsv4.utils.console import make_console

    console = make_console()
    table = Table("class", *VERDICTS, title=f"{report.profile}: {'no finding' if report.ok else 'FINDINGS'}")
    for kind, counts in report.classes.items():
        table.add_row(kind, *(str(counts[verdict]) for verdict in VERDICTS))
    console.print(table)
    for name, problem in list(report.findings.items())[:_SHOWN]:
        console.print(Text(f"{name}: {problem}"), soft_wrap=True)
    if len(report.findings) > _SHOWN:
        console.print(Text(f"and {len(report.findings) - _SHOWN} more (--json lists all)"))
