"""Ctrl-C and SIGTERM end a command within seconds, and leave no process behind.

The first one raises `KeyboardInterrupt`, so that what is being written is finished or removed. A second one, or one
that has not ended the process after `SECONDS_TO_END`, kills this process's own descendants and exits. While a command
is still starting (importing libraries, no process and no file of its own) the first one exits at once: an import can
swallow the exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
SECONDS_TO_END = 30.0

_starting = False
_interrupted = False


@contextmanager
def prompt_interrupts(seconds: float = SECONDS_TO_END) -> Iterator[None]:
    """Handle SIGINT and SIGTERM as the module says, in the main thread only; puts the old handlers back.

    Args:
        seconds: after which a process that was interrupted is ended by force.
    """
    global _interrupted
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupted = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    # The interpreter writes the number of a signal into the pipe the moment it arrives, whatever the main thread does.
    threading.Thread(target=_end_in_time, args=(reader, seconds), name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)


@contextmanager
def starting() -> Iterator[None]:
    """Within: an interrupt exits at once, with nothing cleaned up."""
    global _starting
    _starting = True
    try:
        yield
    finally:
        _starting = False


def end_now() -> None:
    """Kill the descendants of this process and exit with status 130, without any clean-up."""
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def descendants(process: int) -> list[int]:
    """Ids of all processes below one, from /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                # "pid (name) state ppid ...", and a name may hold anything, brackets included.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, rest = [], [process]
    while rest:
        below = children.get(rest.pop(), [])
        found += below
        rest += below
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if _starting or _interrupted:
        end_now()
    _interrupted = True
    raise KeyboardInterrupt


def _end_in_time(reader: int, seconds: float) -> None:
    """Wait for the first SIGINT or SIGTERM, then for the process to end; end it if it does not, or at the second.

    The main thread's handler sees the second one too, but only once the call that it has just entered returns.
    """
    seen, waiter = 0, None
    while numbers := os.read(reader, 64):  # empty once the writing end is closed: the command is over
        seen += sum(number in (signal.SIGINT, signal.SIGTERM) for number in numbers)
        if seen > 1:
            end_now()
        if seen and waiter is None:
            waiter = threading.Timer(seconds, end_now)
            waiter.daemon = True
            waiter.start()
    if waiter is not None:
        waiter.cancel()
    os.close(reader)
