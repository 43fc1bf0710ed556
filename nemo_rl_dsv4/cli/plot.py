"""`nemo-rl-dsv4 plot RUN_DIR`."""

from __future__ import annotations

import argparse
import json

from nemo_rl_dsv4.cli.guard import OK

HELP = "Draw summary.png and report.html of a run from its metrics.jsonl."
EXAMPLE = "example:\n  nemo-rl-dsv4 plot logs/exp_001"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run folder, such as logs/exp_001")


def run(options: argparse.Namespace) -> int:
    """Draws the run and says which files it wrote."""
    from nemo_rl_dsv4.utils.report import plot_run

    files = plot_run(options.run_dir)
    if options.json:
        print(json.dumps({name: str(path) for name, path in files.items()}))
    else:
        for name, path in files.items():
            print(f"{name}: {path}")
    return OK
