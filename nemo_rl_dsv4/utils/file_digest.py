"""SHA-256 of files of any size, streamed; several files at a time."""

import functools
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8
"""hashlib lets other threads run while it works, so files hash in parallel where there are cores."""


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in pieces (memory does not grow with the file)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of every file, by path. A file that has not changed since this process hashed it is not read again.

    Raises:
        OSError: a file cannot be read.
    """
    paths = list(paths)
    with ThreadPoolExecutor(max_workers=min(THREADS, os.cpu_count() or 1, max(len(paths), 1))) as pool:
        return dict(zip(paths, pool.map(_remembered, paths), strict=True))


def _remembered(path: Path) -> str:
    status = path.stat()
    return _sha256_of_version(path, status.st_size, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=4096)
def _sha256_of_version(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    return sha256_of(path)
