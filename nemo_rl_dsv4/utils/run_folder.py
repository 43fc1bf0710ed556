"""Numbered run folders: `<log_dir>/exp_001`, `exp_002`, ..."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_dsv4.errors import UserError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EXAMPLE = "logs/grpo-dsv4-tiny-qat/exp_001"
NAMED = 5
"""Run folders that a message lists."""
_RUN_NAME = re.compile(r"exp_(\d{3,})")


def run_number(folder: Path) -> int | None:
    """The number in a run folder's name, or None for any other name."""
    match = _RUN_NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def next_run_name(log_dir: Path) -> str:
    """The name that the next run gets: one more than the highest number there."""
    numbers = [run_number(path) for path in log_dir.iterdir()] if log_dir.is_dir() else []
    return f"exp_{1 + max((n for n in numbers if n is not None), default=0):03d}"


def make_run_folder(log_dir: Path) -> Path:
    """Makes and returns the next run folder; runs that start at the same time get different ones.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        while True:
            folder = log_dir / next_run_name(log_dir)
            try:
                # mkdir is atomic: of two runs that saw the same number, one fails here and counts again.
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise UserError(
            f"logger.log_dir is {str(log_dir)!r}: cannot make a run folder there ({error.strerror}); choose another"
        ) from error


def checkpoint_folder(checkpoint_dir: Path | str, run_dir: Path) -> Path:
    """Where a run keeps its checkpoints: `<checkpoint_dir>/exp_NNN`, so that runs of one recipe do not mix."""
    return Path(checkpoint_dir) / run_dir.name


def metrics_of(run_dir: Path | str) -> Path:
    """The metrics.jsonl of a run folder.

    Raises:
        UserError: no such folder, or no such file in it; names runs that there are.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder; {_runs_to_name()}")
    if not (run_dir / METRICS_FILE).is_file():
        raise UserError(f"{run_dir} holds no {METRICS_FILE}, so it is no run folder; {_runs_to_name()}")
    return run_dir / METRICS_FILE


def _runs_to_name() -> str:
    """The newest runs below `logs`, in one clause of a message; an example where there are none."""
    logs = Path("logs")
    found = [path for pattern in ("exp_*", "*/exp_*") for path in logs.glob(pattern) if run_number(path) is not None]
    found = [path for path in found if (path / METRICS_FILE).is_file()]
    if not found:
        return f"name one such as {EXAMPLE}"
    newest = sorted(found, key=lambda path: (-(path / METRICS_FILE).stat().st_mtime, path))[:NAMED]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"below {logs} there are {', '.join(map(str, newest))}{more}"


def find_run(asked: str, log_dir: Path) -> Path:
    """The run folder to go on with: `asked`, or the newest one in `log_dir` when `asked` is empty.

    Raises:
        UserError: there is no such run.
    """
    if asked:
        folder = Path(asked)
        if not (folder / CONFIG_FILE).is_file():
            what = "holds no config.yaml, so it is no run folder" if folder.is_dir() else "is no folder"
            raise UserError(f"--resume {asked}: it {what}; name a folder such as {log_dir / 'exp_001'}")
        return folder
    runs = [path for path in log_dir.iterdir() if (path / CONFIG_FILE).is_file()] if log_dir.is_dir() else []
    numbered = [(number, path) for path in runs if (number := run_number(path)) is not None]
    if not numbered:
        raise UserError(
            f"--resume: there is no run in {log_dir} (logger.log_dir); name a run folder or start without it"
        )
    return max(numbered)[1]


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """The recipe a run was started with.

    Raises:
        UserError: the file is no recipe.
    """
    path = run_dir / CONFIG_FILE
    try:
        recorded = yaml.safe_load(path.read_text(encoding="utf-8"))
        recorded["checkpointing"]["checkpoint_dir"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as the recipe of a run ({error})") from error
    return recorded


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees either the old text or all of the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
