"""What every command line does with an error: bad input is one line and exit status 2, Ctrl-C one line and 130."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from nemo_rl_dsv4.errors import UserError

OK, FINDING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def guarded(command: Callable[[], int], *, debug: bool = False) -> int:
    """Runs `command` and returns the process's exit status.

    A `UserError`, also one that a Ray task or actor raised, becomes one line on stderr and status 2. `debug` shows the
    traceback of what would otherwise be one line. Any other exception is a defect: its traceback is always shown, and
    the status is 1.
    """
    try:
        return command()
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {one_line(error)}")
        return BAD_INPUT
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        _say("interrupted")
        return INTERRUPTED


def one_line(error: BaseException) -> str:
    """The message without line breaks; of an error that crossed Ray, the message of the original one."""
    original = getattr(error, "cause", None)
    text = str(original if isinstance(original, BaseException) else error)
    return " ".join(text.split()) or type(error).__name__


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
