"""`metrics.jsonl`: one JSON object a step, appended so that a crash costs at most the step being written."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.run_folder import write_whole

TIMES, STANDARD_ERROR = "timing/", "_stderr"
LONGEST_SECONDS = 1e9
"""Of a step or a phase: 32 years."""
LAST_STEP = 2**31 - 1


def append_step(path: Path, step: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, Any]:
    """Appends `{"step": step, name: value, ...}` as one line and returns the object.

    Values become floats; NaN and infinities, which JSON does not have, become null.
    """
    record: dict[str, Any] = {"step": step}
    for name, value in metrics.items():
        number = float(value)
        record[name] = number if math.isfinite(number) else None
    line = json.dumps(record, allow_nan=False) + "\n"
    # One write of the whole line to a file opened for appending, then to the disk: no reader sees half a line unless
    # the machine itself stops in between, and `read_steps` drops that one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return record


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records in the file, in order. A last line without its end, left by a crash, is dropped.

    NaN is read as the null that a run writes for it.

    Raises:
        UserError: the file cannot be read, or a line before the last is not what a run writes: a record of finite
            numbers and nulls whose step is above the one before, without negative times or standard errors.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{path}: cannot read metrics ({reason})") from error
    complete, _, _ = text.rpartition("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(complete.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(f"{where} is not JSON ({reason}); remove the line") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f"{where} is no record with a whole-numbered step; remove the line")
        _check_step(record["step"], records[-1]["step"] if records else None, where)
        records.append({name: _checked(name, value, where) for name, value in record.items()})
    return records


def _check_step(step: int, before: int | None, where: str) -> None:
    """A run numbers its steps from 0 up, and a resumed one removes the steps that it makes again."""
    if not 0 <= step <= LAST_STEP:
        raise UserError(f"{where}: step is {_short(step)}; wanted 0 to {LAST_STEP}. Remove the line")
    if before is not None and step <= before:
        raise UserError(
            f"{where}: step is {step} after step {before}; wanted steps that go up, as a run writes them. Remove the "
            "lines that do not belong to this run"
        )


def _checked(name: str, value: object, where: str) -> int | float | None:
    """A value that a run may have written; NaN as null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {name} is {_short(value)}; wanted a number or null. Correct the line")
    if value != value:  # NaN
        return None
    if abs(value) > sys.float_info.max:  # exact, also for integers that no float can hold
        raise UserError(f"{where}: {name} is {_short(value)}; wanted a finite number or null. Correct the line")
    if name.startswith(TIMES) and not 0 <= value <= LONGEST_SECONDS:
        raise UserError(f"{where}: {name} is {value}; wanted 0 to {LONGEST_SECONDS:.0e} seconds. Correct the line")
    if name.endswith(STANDARD_ERROR) and value < 0:
        raise UserError(f"{where}: {name} is {value}; wanted a standard error, 0 or more. Correct the line")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def keep_steps_up_to(path: Path, last_step: int) -> int:
    """Removes the records of steps after `last_step`, and a broken last line; returns the number of records kept."""
    if not path.exists():
        return 0
    kept = [record for record in read_steps(path) if record["step"] <= last_step]
    write_whole(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
    return len(kept)
