"""Checkpoint folders that are either whole or not there.

    <folder>/step_12/training_info.json   step, samples, loader and random state, metrics
                     config.yaml          the resolved recipe
                     policy/...           whatever the policy writes
                     SERVE.md             how to export and serve it
                     manifest.json        size and SHA-256 of every file

A checkpoint is written to `tmp_step_12`, checked, and renamed; only then are older ones removed. Whatever interrupts
this leaves the previous checkpoints as they were. With `checkpointing.async_save` the policy only copies its state
before training goes on; files, hashes and the renaming follow in a thread, one checkpoint at a time.
"""

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import (
    CONFIG,
    INFO,
    POLICY,
    read_checkpoint,
    sync_folder,
    write_manifest,
    write_text,
)
from nemo_rl_dsv4.grpo.settings import CheckpointSettings

FinishPolicy = Callable[[], Mapping[str, str]]
"""Waits until a policy's files are complete; returns their SHA-256 by name within the policy's folder."""

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
        notes: {file name: text} for a reader of the folder `step_N` that it is given, written into each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        notes: Callable[[Path], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.folder = Path(folder)
        self.settings = settings
        self._notes = notes
        self._writer: threading.Thread | None = None
        self._writing: Path | None = None
        self._failure: BaseException | None = None

    def write(
        self,
        step: int,
        info: Mapping[str, Any],
        save_policy: Callable[[Path], FinishPolicy | None],
        config_yaml: str | None = None,
    ) -> Path:
        """Write `step_<step>`, then remove what `keep_top_k` does not keep.

        A write that is still going on is waited for first. With `async_save` this returns once the policy has copied
        its state; the folder appears when everything is written, and :meth:`wait` waits for it.

        Args:
            step: steps done.
            info: JSON-able content of training_info.json.
            save_policy: writes the policy into the folder it is given (not made yet). It may return before the files
                are complete, with a function that waits for them.
            config_yaml: content of config.yaml.

        Returns:
            The folder `step_<step>`.

        Raises:
            UserError: the folder cannot be written (permissions, full disk), now or by the write before this one.
        """
        self.wait()
        temporary, final = self.folder / f"tmp_step_{step}", self.folder / f"step_{step}"
        info_text = json.dumps(info, indent=1, allow_nan=False)
        with self._clean_failure(step, temporary):
            self._clean_up()
            temporary.mkdir(parents=True)
            self._writing = temporary
            finish = save_policy(temporary / POLICY)

        def complete() -> None:
            with self._clean_failure(step, temporary):
                known = {f"{POLICY}/{name}": digest for name, digest in (finish() if finish else {}).items()}
                write_text(temporary / INFO, info_text)
                if config_yaml is not None:
                    write_text(temporary / CONFIG, config_yaml)
                for name, text in self._notes(final).items():
                    write_text(temporary / name, text)
                write_manifest(temporary, known)
                read_checkpoint(temporary, hashes=False)
                self._move_into_place(temporary, final)
                self._writing = None
                self._remove_surplus()

        if self.settings.async_save:
            self._writer = threading.Thread(target=self._keep_failure, args=(complete,), name=f"checkpoint-{step}")
            self._writer.start()
        else:
            complete()
        return final

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the write that is going on, if any, is done.

        Args:
            timeout: seconds; None waits as long as it takes. A write that is not done by then goes on.

        Raises:
            UserError: it failed, or one that :meth:`raise_failure` has not reported yet did.
        """
        if self._writer is not None:
            self._writer.join(timeout)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, once, what went wrong in the background; returns at once otherwise."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _keep_failure(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except BaseException as error:
            self._failure = error

    @contextlib.contextmanager
    def _clean_failure(self, step: int, temporary: Path) -> Iterator[None]:
        """Whatever goes wrong, no half checkpoint stays; an error of the file system names the key to change."""
        try:
            yield
        except BaseException as error:
            self._writing = None
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(
                    f"cannot write the checkpoint of step {step} to {self.folder}: {error}; "
                    "free space or change checkpointing.checkpoint_dir (earlier checkpoints are untouched)"
                ) from error
            raise

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
        sync_folder(self.folder)
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
            if leftover != self._writing:
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


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
