"""`nemo-rl-dsv4 doctor`."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.errors import UserError

HELP = "Check this machine, or every node of a Ray cluster, before a run; exit 1 if something is wrong."
EXAMPLE = (
    "examples:\n"
    "  nemo-rl-dsv4 doctor                       this machine alone, with or without GPUs\n"
    "  nemo-rl-dsv4 doctor --address auto --config RECIPE\n"
    "                                            every node of a Ray cluster, against what a recipe asks\n"
    "  nemo-rl-dsv4 doctor --address auto --json | jq '.findings[] | select(.status == \"problem\")'\n\n"
    "checked: GPUs, driver, NVLink or xGMI links, NCCL or RCCL, DeepEP, UCCL, vLLM, HF_HOME (writable, one folder on\n"
    "all nodes), free disk, clocks, package versions (equal, and as pinned)\n\n"
    "exit status: 0 fit (notes may be shown), 1 a problem, 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--address", metavar="ADDRESS", help="Ray cluster: auto, or host:port; left out: this machine")
    parser.add_argument("--config", metavar="RECIPE", help="recipe whose nodes, GPUs and dispatcher are asked for")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=180.0, help="patience with the nodes (default: 180)"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="Hydra overrides of the recipe")


def run(options: argparse.Namespace) -> int:
    """Examines and prints a table, or one JSON object."""
    from nemo_rl_dsv4.doctor.rules import Wanted
    from nemo_rl_dsv4.utils.console import make_console
    from nemo_rl_dsv4.utils.progress import progress

    if not 0 < options.timeout < math.inf:
        raise UserError(f"--timeout is {options.timeout:g}; wanted a number of seconds above 0")
    if options.overrides and options.config is None:
        raise UserError(f"{options.overrides[0]} overrides a recipe, but --config names none")
    wanted = Wanted() if options.config is None else _wanted(options)
    console = make_console(stderr=True)
    with progress(console, "examining") as advance:
        if options.address is None:
            nodes, findings = _this_machine(wanted)
        else:
            from nemo_rl_dsv4.doctor.cluster import connected, examine_cluster

            with connected(options.address, _environment()):
                nodes, findings = examine_cluster(wanted, options.timeout, lambda name: advance(1, f"{name} answered"))
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        document = {"fit": not problems, "findings": [finding.as_dict() for finding in findings], "nodes": nodes}
        print(json.dumps(document))
    else:
        _print(findings, len(nodes), problems)
    return FINDING if problems else OK


def _wanted(options: argparse.Namespace) -> Any:
    from nemo_rl_dsv4.config import load_config, validate
    from nemo_rl_dsv4.doctor.rules import Wanted
    from nemo_rl_dsv4.generation.vllm_settings import VLLM_PYTHON

    config = load_config(Path(options.config), options.overrides)
    validate(config, runs_here=False)
    gpus = config.cluster.gpus_per_node
    dispatcher = config.policy.dtensor_cfg.automodel_kwargs.backend.dispatcher
    nodes = config.cluster.num_nodes if options.address is not None else 0
    vllm = config.policy.generation.backend == "vllm"
    python = str(Path(config.policy.dsv4.vllm_python or VLLM_PYTHON).absolute()) if vllm else ""
    return Wanted(nodes, gpus, dispatcher if gpus else "", python)


def _this_machine(wanted: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    from nemo_rl_dsv4.doctor.node import describe_node, pins
    from nemo_rl_dsv4.doctor.rules import node_findings

    facts = describe_node(vllm_python=wanted.vllm_python)
    return [facts], list(node_findings(facts, wanted, pins()))


def _environment() -> dict[str, str]:
    """Where workers find this package when it is not installed on the nodes but lies on a shared disk."""
    import nemo_rl_dsv4

    parent = str(Path(nemo_rl_dsv4.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))}


def _print(findings: list[Any], nodes: int, problems: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from nemo_rl_dsv4.utils.console import make_console

    table = Table()
    for name in ("", "node", "check", "found", "fix"):
        table.add_column(name, overflow="fold")
    order = {"problem": 0, "note": 1, "ok": 2}
    for finding in sorted(findings, key=lambda finding: order[finding.status]):
        cells = (finding.status, finding.node, finding.check, finding.text, finding.fix)
        table.add_row(*(Text(cell) for cell in cells))
    console = make_console()
    console.print(table)
    words = f"{problems} problem{'s' if problems > 1 else ''}" if problems else "fit"
    console.print(Text(f"{words}: {nodes} node{'s' if nodes != 1 else ''} examined"))
