"""Checkpoint folders that are either whole or not there.

    <folder>/step_12/training_info.json   step, samples, loader and random state, metrics
                     config.yaml          the resolved recipe
                     policy/...           whatever the policy writes
                     manifest.json        size of every file, and the SHA-256 of those up to 16 MiB

A checkpoint is written to `tmp_step_12`, checked, and renamed; only then are older ones removed. Whatever interrupts
this leaves the previous checkpoints as they were.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.settings import CheckpointSettings

INFO, CONFIG, MANIFEST, POLICY = "training_info.json", "config.yaml", "manifest.json", "policy"
HASHED_UP_TO_BYTES = 16 * 2**20
"""Larger files are checked by size alone: hashing terabytes would take longer than the step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    folder: Path
    info: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where the `step_N` folders go; made when the first one is written.
        settings: `checkpointing`; `checkpoint_dir` is not read here.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        self.folder = Path(folder)
        self.settings = settings

    def write(
        self, step: int, info: Mapping[str, Any], save_policy: Callable[[Path], None], config_yaml: str | None = None
    ) -> Path:
        """Write `step_<step>`, then remove what `keep_top_k` does not keep.

        Args:
            step: steps done.
            info: JSON-able content of training_info.json.
            save_policy: writes the policy into the folder it is given (not made yet).
            config_yaml: content of config.yaml.

        Raises:
            UserError: the folder cannot be written (permissions, full disk).
        """
        temporary, final = self.folder / f"tmp_step_{step}", self.folder / f"step_{step}"
        try:
            self._clean_up()
            temporary.mkdir(parents=True)
            save_policy(temporary / POLICY)
            _write_text(temporary / INFO, json.dumps(info, indent=1, allow_nan=False))
            if config_yaml is not None:
                _write_text(temporary / CONFIG, config_yaml)
            _write_text(temporary / MANIFEST, json.dumps(_describe_files(temporary), indent=1))
            read_checkpoint(temporary)
            self._move_into_place(temporary, final)
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.folder}: {error}; "
                "free space or change checkpointing.checkpoint_dir (earlier checkpoints are untouched)"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._remove_surplus()
        return final

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints by step; damaged ones are left out and named in a warning."""
        self._clean_up()
        found = []
        for folder in self._step_folders():
            try:
                found.append(Checkpoint(_step_of(folder), folder, read_checkpoint(folder, hashes=False)))
            except UserError as error:
                log.warning("skipping a damaged checkpoint: %s", error)
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Path:
        """The newest checkpoint that is whole, hashes included; damaged ones are skipped with a warning.

        Raises:
            UserError: there is none.
        """
        for checkpoint in reversed(self.all()):
            try:
                read_checkpoint(checkpoint.folder)
            except UserError as error:
                log.warning("skipping a damaged checkpoint: %s", error)
            else:
                return checkpoint.folder
        raise UserError(f"{self.folder} holds no whole checkpoint to resume from; start without --resume")

    def refuse_if_used(self) -> None:
        """A new run must not mix its checkpoints with those of another.

        Raises:
            UserError: the folder holds checkpoints.
        """
        folders = self._step_folders()
        if folders:
            raise UserError(
                f"{self.folder} already holds checkpoints ({sorted(f.name for f in folders)[-1]}); "
                "continue with --resume, or set another checkpointing.checkpoint_dir"
            )

    def kept(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Those that `keep_top_k` keeps: the k best by `metric_name` (newer wins ties), and always the newest.

        Without `metric_name` the k newest. A checkpoint without the metric (no validation at its step) ranks last.
        """
        if self.settings.keep_top_k is None or not checkpoints:
            return checkpoints

        def rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
            name = self.settings.metric_name
            value = None if name is None else checkpoint.info.get(name)
            if value is None:
                return (False, 0.0, checkpoint.step)
            return (True, value if self.settings.higher_is_better else -value, checkpoint.step)

        best = sorted(checkpoints, key=rank, reverse=True)[: self.settings.keep_top_k]
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.step)
        return best if newest in best else [*best, newest]

    def _remove_surplus(self) -> None:
        checkpoints = self.all()
        kept = {checkpoint.step for checkpoint in self.kept(checkpoints)}
        for checkpoint in checkpoints:
            if checkpoint.step not in kept:
                doomed = self.folder / f"tmp_delete_step_{checkpoint.step}"
                checkpoint.folder.rename(doomed)
                shutil.rmtree(doomed)

    def _move_into_place(self, temporary: Path, final: Path) -> None:
        replaced = self.folder / f"old_{final.name}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove what an interrupted write left, and put back a checkpoint it was about to replace."""
        if not self.folder.is_dir():
            return
        for replaced in self.folder.glob("old_step_*"):
            final = self.folder / replaced.name.removeprefix("old_")
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        for leftover in self.folder.glob("tmp_*step_*"):
            shutil.rmtree(leftover)

    def _step_folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]


def latest_of_runs(folder: Path, settings: CheckpointSettings) -> Path:
    """The newest whole checkpoint of the newest run that has one, where each run has a folder of its own.

    Args:
        folder: holds one folder a run, such as `exp_003`; the highest number is the newest run.
        settings: `checkpointing`.

    Raises:
        UserError: no run has a whole checkpoint.
    """
    runs = [path for path in Path(folder).glob("*_*") if path.is_dir() and path.name.rpartition("_")[2].isdecimal()]
    for run in sorted(runs, key=lambda path: int(path.name.rpartition("_")[2]), reverse=True):
        store = CheckpointStore(run, settings)
        if store.all():
            return store.latest()
    raise UserError(f"{folder} holds no run with a whole checkpoint; start without --resume")


def read_checkpoint(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest and return training_info.json.

    Args:
        folder: a `step_N` folder.
        hashes: False compares sizes only.

    Raises:
        UserError: names the file that is missing, truncated or changed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} does not exist")
    manifest = _read_json(folder / MANIFEST)
    for name, wanted in manifest.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"checkpoint {folder} is damaged: {name} is missing")
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise UserError(f"checkpoint {folder} is damaged: {name} has {size} bytes, {wanted['bytes']} were written")
        if hashes and "sha256" in wanted and _sha256(path) != wanted["sha256"]:
            raise UserError(f"checkpoint {folder} is damaged: the content of {name} is not what was written")
    return _read_json(folder / INFO)


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            entry: dict[str, Any] = {"bytes": size}
            if size <= HASHED_UP_TO_BYTES:
                entry["sha256"] = _sha256(path)
            described[path.relative_to(folder).as_posix()] = entry
    return described


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {path.parent} is damaged or no checkpoint: {path.name} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name} holds no JSON object")
    return content


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
