"""Types of options that benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """For `add_argument(type=)`: a whole number from `least` up; anything else is named beside what was wanted."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; wanted a whole number, {least} or more")
        return value

    return read
