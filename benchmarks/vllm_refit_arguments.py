"""Options of `vllm_refit.py`: which go together, and what a phase needs before it can start."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from arguments import at_least

from nemo_rl_dsv4.errors import UserError

PHASES_OF = {
    "sleep": ("refit",),
    "direct": ("refit",),
    "ranks": ("refit",),
    "transport": ("refit", "compare"),
    "tensor_parallel": ("refit", "fresh"),
}
"""Option -> phases that read it."""


def needed_files(options: argparse.Namespace) -> dict[str, str]:
    """Files that a phase reads, relative to its folder -> the command that writes them."""
    folder = options.folder
    if options.phase == "make":
        return {}
    if options.phase == "compare":
        names = {f"refit-{name}.pt": f"refit {folder} --ranks 2 --transport {name}" for name in options.transport}
        return {"fresh.pt": f"fresh {folder}", **(names or {"refit.pt": f"refit {folder}"})}
    checkpoint = "v2" if options.phase == "fresh" else "v0"
    names = [f"{checkpoint}/config.json", f"{checkpoint}/model.safetensors"]
    if options.phase == "refit" and not options.ranks:
        names += [f"buckets{version}/bucket-00000.json" for version in ((1, 2) if options.direct else (1, 2, 3))]
    return dict.fromkeys(names, f"make {folder}")


def check_phase(options: argparse.Namespace) -> None:
    """Refuse a phase that cannot run yet, or not here.

    Raises:
        UserError: files of an earlier phase, vLLM or GPUs are missing.
    """
    for name, command in needed_files(options).items():
        if not (options.folder / name).is_file():
            raise UserError(f"{options.folder} has no {name}; run `python benchmarks/vllm_refit.py {command}` first")
    if options.phase not in ("refit", "fresh"):
        return
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"`{options.phase}` needs vLLM 0.26.0, and there is no vllm in this environment; start it with the "
            "interpreter of one that has it"
        )
    wanted, found = max(options.tensor_parallel, options.ranks), torch.cuda.device_count()
    if found < wanted:
        raise UserError(f"`{options.phase}` with these options wants {wanted} GPUs; torch sees {found} here")


def read_options(description: str) -> argparse.Namespace:
    """Options of the command line, which go together."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("make", "refit", "fresh", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sleep", action="store_true", help="refit: sleep at level 2 before the second refit")
    parser.add_argument("--direct", action="store_true", help="refit: two more, straight into the kernels' memory")
    parser.add_argument("--tensor-parallel", type=at_least(1), default=1, help="refit, fresh: GPUs of the engine")
    parser.add_argument(
        "--ranks", type=at_least(0), default=0, help="refit: training ranks that send; 0 takes make's buckets"
    )
    parser.add_argument(
        "--transport",
        nargs="+",
        default=[],
        choices=("folder", "ipc", "broadcast"),
        help="refit with --ranks, compare: how weights travel",
    )
    options = parser.parse_args()
    for name, phases in PHASES_OF.items():
        if getattr(options, name) != parser.get_default(name) and options.phase not in phases:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} with `{options.phase}`; it goes with {' and '.join(f'`{p}`' for p in phases)}")
    if options.direct and (options.sleep or options.ranks):
        parser.error("--direct goes with neither --sleep nor --ranks")
    if options.sleep and options.ranks:
        parser.error("--sleep does not go with --ranks")
    if options.phase == "refit" and options.tensor_parallel > 1 and not options.ranks:
        parser.error(
            f"`refit` with --tensor-parallel {options.tensor_parallel} takes weights from training ranks only; add "
            "--ranks and --transport"
        )
    if options.phase == "refit" and bool(options.ranks) != bool(options.transport):
        parser.error("--ranks and --transport go together")
    return options
