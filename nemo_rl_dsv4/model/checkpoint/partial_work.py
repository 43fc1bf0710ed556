"""The folder of an unfinished conversion: locked, and with a record of the shards that are finished."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.folder import write_text

STATE = "partial.json"


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
            state = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.save()
            return
        if state["fingerprint"] != self._fingerprint:
            raise UserError(f"{self.folder} holds another, unfinished conversion; remove it to start this one")
        self.shards, self.results = state["shards"], state["results"]

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
        """Make the folder appear under its final name, without the record."""
        (self.folder / STATE).unlink()
        self.folder.rename(destination)
