"""Refuse what only looks like a file: opening a FIFO waits for ever for a writer, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def require_regular(path: Path) -> None:
    """Call before opening a file that someone names; a link to a regular file is one, and folders are left to `open`.

    Raises:
        OSError: a FIFO, socket or device; or the file is missing or cannot be reached, as `open` would say.
    """
    kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"{kind}, wanted a regular file", str(path))
