"""`nemo-rl-dsv4 plot RUN_DIR [RUN_DIR ...]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_rl_dsv4.cli.guard import OK
from nemo_rl_dsv4.errors import UserError

HELP = "Draw summary.png and report.html of a run from its metrics.jsonl, or compare several runs in one picture."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 plot logs/grpo-dsv4-tiny-qat/exp_001\n"
    "  nemo-rl-dsv4 plot logs/grpo-dsv4-tiny-*/exp_001 --out comparison.png     one line a run, and a table"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        type=Path,
        help="run folder, such as logs/grpo-dsv4-tiny-qat/exp_001",
    )
    parser.add_argument(
        "--out",
        metavar="PNG",
        type=Path,
        help="picture of a comparison (results/comparison.png); one run's picture lies in its folder",
    )


def run(options: argparse.Namespace) -> int:
    """Draws one run or several and says which files it wrote."""
    if len(options.run_dirs) > 1:
        return _compare(options)
    from nemo_rl_dsv4.utils.report import plot_run

    if options.out is not None:
        raise UserError(f"--out {options.out} is for several runs; one run's pictures are written into its folder")
    files = plot_run(options.run_dirs[0])
    if options.json:
        print(json.dumps({name: str(path) for name, path in files.items()}))
    else:
        for name, path in files.items():
            print(f"{name}: {path}")
    return OK


def _compare(options: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from nemo_rl_dsv4.utils.compare import draw_comparison, summarize_run, training_records
    from nemo_rl_dsv4.utils.console import make_console

    out = options.out or Path("results/comparison.png")
    _check_comparison(options.run_dirs, out)
    names = _short_names(options.run_dirs)
    runs = {name: training_records(run_dir) for name, run_dir in zip(names, options.run_dirs, strict=True)}
    draw_comparison(runs, out)
    rows = {name: summarize_run(records) for name, records in runs.items()}
    if options.json:
        print(json.dumps({"plots": str(out), "runs": rows}))
        return OK
    table = Table("")
    for name in names:
        table.add_column(Text(name))
    for number in dict.fromkeys(key for row in rows.values() for key in row):
        table.add_row(number, *(f"{row[number]:.4g}" if number in row else "" for row in rows.values()))
    console = make_console()
    console.print(table)
    console.print(f"plots: {out}", soft_wrap=True, markup=False)
    return OK


def _check_comparison(run_dirs: list[Path], out: Path) -> None:
    """Refuses what would be drawn wrongly, or over a file that is no picture, before anything is read."""
    from nemo_rl_dsv4.utils.compare import MAX_RUNS

    if out.suffix != ".png":
        raise UserError(f"--out is {str(out)!r}; wanted a file whose name ends in .png")
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"{len(run_dirs)} runs; one picture holds at most {MAX_RUNS}: compare fewer at a time")
    seen: dict[Path, Path] = {}
    for run_dir in run_dirs:
        first = seen.setdefault(run_dir.resolve(), run_dir)
        if first is not run_dir:
            raise UserError(f"{run_dir} is the same run as {first}; name each run once")


def _short_names(run_dirs: list[Path]) -> list[str]:
    """Each folder without the parts that all begin and end with; whole where that leaves nothing or two alike."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    first = next((i for i, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1), 0)
    names = ["/".join(of_one[first:]) for of_one in parts]
    return names if len(set(names)) == len(names) and all(names) else [str(run_dir) for run_dir in run_dirs]
