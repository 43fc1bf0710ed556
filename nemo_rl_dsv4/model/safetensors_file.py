"""Read safetensors files: every header problem at once, then single tensors or rows of them by byte range.

A header is trusted for nothing: its JSON, dtypes, shapes, offsets, gaps and overlaps are checked against each other and
against the length of the file before a byte of a tensor is read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_MAX_HEADER_BYTES = 100_000_000
_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EREMOTEIO}
_OPEN_FILES = 64


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file; `begin` and `end` are byte offsets in the file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin

    def read(self) -> torch.Tensor:
        """Read the tensor into memory of its own; `UserError` if the file shrank or cannot be read."""
        with ShardReader() as reader:
            return reader.read(self)


@dataclass(frozen=True)
class HeaderProblem:
    """Something wrong with a file, or with one of its tensors."""

    tensor: str | None
    message: str


@dataclass
class Header:
    """What a header says (tensors that make sense by themselves) and everything wrong with it."""

    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[HeaderProblem] = field(default_factory=list)


class DuplicateKey(ValueError):
    """A JSON object that names a key twice, of which readers would keep one without a word."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise DuplicateKey(f"the key {repeated!r} appears twice")
    return found


class ShardReader:
    """Reads tensors of many files by byte range; keeps files open, and tries again what a network mount lost.

    Reads of one reader may come from several threads. Use as a context manager, or `close` it.

    Attributes:
        bytes_read: bytes handed out so far.
        retries: reads that failed and were repeated.
    """

    def __init__(self, *, attempts: int = 4, seconds_between: float = 0.5) -> None:
        """`attempts`: tries of a read before it is an error; `seconds_between` doubles after each."""
        self._attempts, self._seconds = attempts, seconds_between
        self._open: OrderedDict[Path, int] = OrderedDict()
        self.bytes_read = self.retries = 0

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; the reader may be used again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, tensor: StoredTensor, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read a tensor, or its rows [first, last), into memory of its own.

        Raises:
            UserError: the file shrank, or still cannot be read after the last attempt.
        """
        shape, begin, size = tensor.shape, tensor.begin, tensor.bytes
        if rows is not None:
            row = size // max(shape[0], 1)
            shape, begin, size = (rows[1] - rows[0], *shape[1:]), begin + rows[0] * row, (rows[1] - rows[0]) * row
        raw = torch.empty(size, dtype=torch.uint8)
        self._fill(tensor, memoryview(raw.numpy().data).cast("B") if size else memoryview(b""), begin)
        self.bytes_read += size
        return raw.view(tensor.dtype).reshape(shape)

    def _fill(self, tensor: StoredTensor, into: memoryview, begin: int) -> None:
        got, wait = 0, self._seconds
        for attempt in range(self._attempts):
            try:
                while got < len(into):
                    count = os.preadv(self._descriptor(tensor.path), [into[got:]], begin + got)
                    if count == 0:
                        raise UserError(
                            f"{tensor.path}: tensor {tensor.name!r} has {got} of {len(into)} bytes; the file is "
                            "truncated, fetch it again"
                        )
                    got += count
                return
            except OSError as error:
                if attempt == self._attempts - 1 or error.errno not in _TRANSIENT:
                    raise UserError(
                        f"{tensor.path}: cannot read tensor {tensor.name!r} ({error.strerror or error}; tried "
                        f"{attempt + 1} times)"
                    ) from error
            self._forget(tensor.path)
            self.retries += 1
            time.sleep(wait)
            wait *= 2

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def _forget(self, path: Path) -> None:
        if path in self._open:
            os.close(self._open.pop(path))


def scan_header(path: Path) -> Header:
    """Read one file's header and list everything wrong with it; nothing is raised for a damaged file.

    Checked: the file exists and holds a whole JSON header without repeated keys; every dtype is known; shape, dtype and
    offsets agree; tensors follow each other without gap or overlap up to exactly the end of the file.
    """
    header = Header(path)

    def problem(message: str, tensor: str | None = None) -> None:
        header.problems.append(HeaderProblem(tensor, f"{path}: {message}"))

    try:
        require_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                problem(f"no safetensors header in its {size} bytes; the file is damaged or truncated")
                return header
            entries = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except OSError as error:
        problem(f"cannot be read ({error.strerror or error})")
        return header
    except (ValueError, RecursionError) as error:
        problem(f"the safetensors header is not JSON ({error}); the file is damaged")
        return header
    if not isinstance(entries, dict):
        problem("the safetensors header is no JSON object; the file is damaged")
        return header
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        found = _entry(path, name, entry, 8 + length)
        if isinstance(found, StoredTensor):
            header.tensors[name] = found
        else:
            problem(found, name)
    if not header.problems:
        _check_places(header, 8 + length, size, problem)
    return header


def _check_places(header: Header, position: int, size: int, problem: Any) -> None:
    ordered = sorted(header.tensors.values(), key=lambda t: (t.begin, t.end))
    beyond = [tensor for tensor in ordered if tensor.end > size]
    for tensor in ordered:
        if tensor.begin != position:
            fault = "overlaps the tensor before it" if tensor.begin < position else "leaves a gap before it"
            problem(
                f"tensor {tensor.name!r} begins at byte {tensor.begin}, wanted {position}: it {fault}; damaged header",
                tensor.name,
            )
        position = max(position, tensor.end)
    for tensor in beyond:
        problem(
            f"tensor {tensor.name!r} ends at byte {tensor.end} of {size}; the file is truncated, fetch it again",
            tensor.name,
        )
        del header.tensors[tensor.name]
    if position < size:
        problem(f"{size} bytes, but its tensors end at {position}; the file is damaged")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name after the checks of `scan_header`.

    Raises:
        UserError: the first thing wrong with the file.
    """
    header = scan_header(path)
    if header.problems:
        raise UserError(header.problems[0].message)
    return header.tensors


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor | str:
    """One tensor of a header, or what is wrong with its entry."""
    kind = entry.get("dtype") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(kind, str) or kind not in DTYPES:
        return f"tensor {name!r} has dtype {kind!r}; wanted one of {', '.join(DTYPES)}"
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        return (
            f"tensor {name!r} has shape {entry.get('shape')!r} and offsets {entry.get('data_offsets')!r}; "
            "damaged header"
        )
    dtype = DTYPES[kind]
    wanted = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != wanted:
        return f"tensor {name!r} has {offsets[1] - offsets[0]} bytes; {kind} {shape} takes {wanted}"
    return StoredTensor(path, name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(values: object) -> list[int] | None:
    return values if isinstance(values, list) and all(type(v) is int and v >= 0 for v in values) else None
