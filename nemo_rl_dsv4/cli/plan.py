"""`nemo-rl-dsv4 plan --config RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nemo_rl_dsv4.cli.guard import FINDING, OK

HELP = "Lay a recipe over its GPUs without having one; exit 1 if something does not fit."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 plan --config examples/configs/recipes/llm/"
    "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml\n"
    "  the same on other GPUs, and with longer rows:\n"
    "  nemo-rl-dsv4 plan --config RECIPE --gpu h200 policy.max_total_sequence_length=10240\n\n"
    "exit status: 0 fits, 1 something does not fit, 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--config", metavar="RECIPE", required=True, help="YAML file of the recipe")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="h100, h200, b200, gb200, mi300x, mi355x, or GiB of memory; left out: policy.dsv4.gpu of the recipe",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="Hydra overrides of the recipe")


def run(options: argparse.Namespace) -> int:
    """Plans the recipe and prints it."""
    from nemo_rl_dsv4.config import load_config, validate
    from nemo_rl_dsv4.planning.hardware import gpu_bytes
    from nemo_rl_dsv4.utils.console import make_console
    from nemo_rl_dsv4.utils.progress import progress

    config = load_config(Path(options.config), options.overrides)
    validate(config, runs_here=False)
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)
    name = config.policy.dsv4.gpu if options.gpu is None else options.gpu
    gpu = None if name is None else gpu_bytes(name)
    console = make_console(stderr=True)
    with progress(console, "planning") as advance:
        from nemo_rl_dsv4.planning.plan import make_plan

        plan = make_plan(config, gpu, on_stage=lambda stage: advance(1, stage))
    from nemo_rl_dsv4.cli.plan_tables import as_document, print_plan

    if options.json:
        print(json.dumps(as_document(plan, name)))
    else:
        print_plan(plan, config, name, make_console())
    return FINDING if plan.findings else OK
