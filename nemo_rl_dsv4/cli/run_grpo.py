"""`examples/run_grpo.py`: one GRPO run from a recipe."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from nemo_rl_dsv4.cli.guard import BAD_INPUT, OK, guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.interrupts import prompt_interrupts, starting

EXAMPLE = """\
examples:
  a whole run on a CPU:
    uv run examples/run_grpo.py --config examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml
  the same with other settings, only checked:
    uv run examples/run_grpo.py --config examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml \\
      --dry-run grpo.max_num_steps=5 policy.dsv4.train_mode=bf16
  the same run under NeMo-RL's own loop (docs/nemo_rl.md):
    PYTHONPATH=path/to/RL uv run examples/run_grpo.py --trainer nemo_rl \\
      --config examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml
  go on with the newest run of the recipe's log folder:
    uv run examples/run_grpo.py --config examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml --resume

overrides use Hydra's grammar: key=value changes a key, +key=value adds one that the recipe does not set, ~key removes
one. Keys are NeMo-RL's; examples/configs/grpo_dsv4.yaml lists all of them.

exit status: 0 done, 1 failed, 2 bad input, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise UserError(f"{message} (see --help)")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line arguments; `overrides` holds the `key=value` words wherever they stand.

    Raises:
        UserError: a missing or unknown option.
    """
    parser = _Parser(
        prog="run_grpo.py",
        usage="run_grpo.py --config RECIPE [--trainer T] [--dry-run] [--resume [RUN_DIR]] [--debug] [key=value ...]",
        description="Train a DeepSeek-V4 with GRPO as a recipe says.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="RECIPE", required=True, help="YAML file of the recipe")
    parser.add_argument(
        "--trainer",
        choices=("auto", "embedded", "nemo_rl"),
        help="whose loop trains: this package's own, or NeMo-RL's grpo_train (its checkout on PYTHONPATH, Python 3.12 "
        "or newer); auto takes NeMo-RL's where it can be imported. Wins over the recipe's key `runtime`",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print the topology and stop")
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        nargs="?",
        const="",
        help="go on with this run's folder (logs/.../exp_NNN), or with the newest one in logger.log_dir",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="Hydra overrides of the recipe")
    # `--resume key=value`: the word after --resume is an override, not a folder.
    words = []
    for word in arguments:
        if words and words[-1] == "--resume" and "=" in word and not Path(word).is_dir():
            words[-1] = "--resume="
        words.append(word)
    return parser.parse_intermixed_args(words)


def run(options: argparse.Namespace) -> int:
    """Loads and checks the recipe, then prints the topology or starts the run."""
    from nemo_rl_dsv4.config import load_config, validate
    from nemo_rl_dsv4.config.rules_of_run import missing_trackers
    from nemo_rl_dsv4.config.unused_keys import unknown_overrides, unused_keys
    from nemo_rl_dsv4.utils.console import make_console
    from nemo_rl_dsv4.utils.run_folder import find_run, recorded_config

    chosen = [] if options.trainer is None else [f"++runtime={options.trainer}"]
    config = load_config(Path(options.config), [*options.overrides, *chosen])
    runtime = validate(config, runs_here=not options.dry_run)
    resume = None if options.resume is None else find_run(options.resume, Path(config.logger.log_dir))
    unused = unused_keys(config) if runtime == "embedded" else []
    for notice in (*config.notices, *missing_trackers(config), *unknown_overrides(config), *unused):
        print(f"note: {notice}", file=sys.stderr)
    if options.dry_run:
        from nemo_rl_dsv4.cli.dry_run import print_dry_run

        if resume is not None:
            recorded_config(resume)  # refused now rather than by the run
        print_dry_run(config, runtime, make_console(), resume)
        return OK

    silence_library_warnings()
    print("the recipe is valid; loading libraries (some seconds, up to a minute on a busy machine) ...", flush=True)
    with starting():
        if runtime == "nemo_rl":
            from nemo_rl_dsv4.integrations.nemo_rl.run import run as start
        else:
            from nemo_rl_dsv4.runtime import run as start

    start(config, resume=resume)
    return OK


def silence_library_warnings() -> None:
    """Leave out what libraries say at import about parts that a recipe does not use."""
    for message in (
        "Transformer Engine and Apex are not installed",
        "invalid escape sequence",
        "torch.distributed is disabled, unavailable or uninitialized",
    ):
        warnings.filterwarnings("ignore", message=message)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `examples/run_grpo.py`; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with prompt_interrupts():
            return guarded(lambda: run(parse(words)), debug="--debug" in words)
    except SystemExit as stop:  # argparse's --help
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
