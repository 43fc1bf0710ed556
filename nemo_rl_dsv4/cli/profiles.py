"""`nemo-rl-dsv4 profiles [NAME] [--diff A B]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.errors import UserError

HELP = "Show what each rollout engine rounds, and how; exit 1 if --diff finds a difference."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 profiles                                        names of the profiles\n"
    "  nemo-rl-dsv4 profiles vllm-hopper                            every site of one\n"
    "  nemo-rl-dsv4 profiles --diff vllm-hopper vllm-blackwell      where two part"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="profile; left out: list all")
    parser.add_argument(
        "--diff",
        metavar=("A", "B"),
        nargs=2,
        help="two profiles to compare: exit 0 if they agree, 1 if they differ, 2 if one does not exist",
    )


def run(options: argparse.Namespace) -> int:
    """Prints a list, one profile, or the difference of two."""
    from nemo_rl_dsv4.numerics.profiles import COLUMNS, PROFILES, diff, get_profile

    if options.diff is not None:
        if options.name is not None:
            raise UserError(f"profiles: give either NAME ({options.name}) or --diff A B, not both")
        left, right = (get_profile(name) for name in options.diff)
        differences = diff(left, right)
        _print(options.json, {"left": left.name, "right": right.name, "differences": differences}, differences)
        return FINDING if differences else OK
    if options.name is not None:
        profile = get_profile(options.name)
        rows = profile.rows()
        document = {"name": profile.name, "title": profile.title, "rows": rows, "columns": COLUMNS}
        _print(options.json, document, rows, profile.title, COLUMNS)
        return OK
    rows = [{"name": profile.name, "title": profile.title} for profile in PROFILES.values()]
    _print(options.json, {"profiles": rows}, rows)
    return OK


def _print(
    as_json: bool,
    document: dict[str, object],
    rows: list[dict[str, str]],
    title: str | None = None,
    legend: Mapping[str, str] | None = None,
) -> None:
    """One JSON object, or a table with its notes, sources and legend below: those are too long for a column."""
    if as_json:
        print(json.dumps(document))
        return
    from rich.table import Table
    from rich.text import Text

    from nemo_rl_dsv4.numerics.profiles import STEP
    from nemo_rl_dsv4.utils.console import make_console

    console = make_console()
    if not rows:
        console.print("no difference")
        return
    # Columns that are empty in every row say nothing.
    below = ("note", "source") if legend else ()
    columns = [name for name in rows[0] if name not in below and any(row[name] for row in rows)]
    if title is not None:
        console.print(Text(title, style="bold"))
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "site")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    console.print(table)
    if legend is None:
        return
    console.print(Text("columns", style="bold"))
    for name, meaning in legend.items():
        if name in columns:
            console.print(Text(f"{name}: {meaning}"), soft_wrap=True)
    for name in ("source", "note"):
        console.print(Text(f"{name}s", style="bold"))
        for row in rows:
            if row[name] not in ("", STEP):
                console.print(Text(f"{row['site']}: {row[name]}"), soft_wrap=True)
