"""Types of options that benchmarks share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST = 2**31 - 1
"""Of any size or count."""


def at_least(least: int) -> Callable[[str], int]:
    """For `add_argument(type=)`: a whole number from `least` to `MOST`; others are named beside what was wanted."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; wanted a whole number, {least} or more")
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{text!r}; wanted a whole number, at most {MOST}")
        return value

    return read


def positive(text: str) -> float:
    """For `add_argument(type=)`: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted a number above 0")
    return value


def not_negative(text: str) -> float:
    """For `add_argument(type=)`: a finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted a number, 0 or more")
    return value
