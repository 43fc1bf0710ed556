"""The folder of an unfinished conversion: locked, and with a record of the shards that are finished."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.folder import write_text
from nemo_rl_dsv4.model.safetensors_file import scan_header
from nemo_rl_dsv4.regular_file import require_regular

STATE = "partial.json"


def check_destination(destination: Path, source: Path) -> None:
    """Refuse a place where the result cannot appear, before any work is done.

    Raises:
        UserError: something is there (a link to nothing included), it has no name, or it lies inside `source`.
    """
    if destination.name in ("", ".."):
        raise UserError(f"{destination} has no name of its own; give the folder to make")
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already; remove it or choose another folder")
    inside, outer = os.path.realpath(destination), os.path.realpath(source)
    if Path(inside).is_relative_to(outer):
        raise UserError(f"{destination} lies inside {source}, which is only read; choose a folder outside of it")


class PartialWork:
    """Context manager around the folder.

    Attributes:
        shards: {finished file: {tensor: CRC-32 of its bytes}}.
        results: {weight: [action, relative error]} of everything converted so far.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """`fingerprint` identifies the source files and the settings; work of another one is not continued."""
        self.folder, self._fingerprint = folder, fingerprint
        self.shards: dict[str, dict[str, int]] = {}
        self.results: dict[str, list] = {}

    def __enter__(self) -> PartialWork:
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._continue()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise UserError(f"{self.folder}: another conversion is writing there; wait for it to end") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _continue(self) -> None:
        try:
            require_regular(self.folder / STATE)
            state = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            if not _is_record(state):
                raise ValueError("not what a conversion writes")
        except FileNotFoundError:
            self.save()
            return
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{self.folder / STATE}: cannot be read as the record of an unfinished conversion ({error}); remove "
                f"{self.folder} to start it anew"
            ) from error
        if state["fingerprint"] != self._fingerprint:
            raise UserError(f"{self.folder} holds another, unfinished conversion; remove it to start this one")
        self.shards, self.results = state["shards"], state["results"]

    def take_over(self, file: str) -> bool:
        """Whether a shard is finished and, by its header and size, whole; one that is not is forgotten, to be redone.

        The bytes of its tensors are compared with their checksums at the end, like those of new shards.
        """
        if file not in self.shards:
            return False
        header = scan_header(self.folder / file)
        if not header.problems and set(header.tensors) == set(self.shards[file]):
            return True
        del self.shards[file]
        self.save()
        return False

    def finished(self, file: str, checksums: dict[str, int]) -> None:
        """Record that a shard is on the disk."""
        self.shards[file] = checksums
        self.save()

    def save(self) -> None:
        """Write the record, whole or not at all."""
        state = {"fingerprint": self._fingerprint, "shards": self.shards, "results": self.results}
        fresh = self.folder / f"{STATE}.new"
        write_text(fresh, json.dumps(state))
        fresh.rename(self.folder / STATE)

    def move_to(self, destination: Path) -> None:
        """Make the folder appear under its final name, without the record, which goes last: until then work is kept.

        Raises:
            UserError: something has appeared at `destination`.
            OSError: the folder cannot be renamed.
        """
        if os.path.lexists(destination):
            raise UserError(
                f"{destination} has appeared during the conversion; the finished work is kept in {self.folder}: remove "
                f"{destination} and give the same command again"
            )
        self.folder.rename(destination)
        (destination / STATE).unlink()


def _is_record(state: object) -> bool:
    """Whether this has the form of `PartialWork.save`."""
    if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), str):
        return False
    shards, results = state.get("shards"), state.get("results")
    return (
        isinstance(shards, dict)
        and all(isinstance(sums, dict) and all(type(s) is int for s in sums.values()) for sums in shards.values())
        and isinstance(results, dict)
        and all(isinstance(result, list) and len(result) == 2 for result in results.values())
    )
