"""`nemo-rl-dsv4`: tools around a run."""

from __future__ import annotations

import argparse
import sys

from nemo_rl_dsv4.cli import convert, doctor, inspect, mismatch, plan, plot, profiles, verify_refit
from nemo_rl_dsv4.cli.guard import BAD_INPUT, guarded
from nemo_rl_dsv4.errors import UserError

COMMANDS = {
    "convert": convert,
    "doctor": doctor,
    "inspect": inspect,
    "mismatch": mismatch,
    "plan": plan,
    "plot": plot,
    "profiles": profiles,
    "verify-refit": verify_refit,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise UserError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """The parser with one subcommand for each module of `COMMANDS`."""
    parser = _Parser(
        prog="nemo-rl-dsv4",
        description="Tools around GRPO runs of DeepSeek-V4.",
        epilog="example:\n  nemo-rl-dsv4 plot logs/grpo-dsv4-tiny-qat/exp_001\n\n"
        "exit status: 0 done, 1 a finding, 2 bad input, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(command=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments

    def parse_and_run() -> int:
        options = make_parser().parse_args(words)
        return options.command(options)

    try:
        return guarded(parse_and_run, debug="--debug" in words)
    except SystemExit as stop:  # argparse's --help
        return stop.code if isinstance(stop.code, int) else BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
