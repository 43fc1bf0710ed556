"""Whether the hosts of a run share the folders that they have to, asked before anything is loaded.

The driver and every host write a marker of their own; each must see the others'. On one host there is nothing to ask.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.hosts import Host
from nemo_rl_dsv4.utils.ray_calls import get

MARKER = ".nemo-rl-dsv4-shared-"
SECONDS_TO_APPEAR = 15.0
"""Network file systems show a new file after some seconds."""
Ask = Callable[[Sequence[Host], Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]
"""Calls a function once on each host, with that host's arguments; answers in the order of the hosts."""


def elsewhere(hosts: Sequence[Host]) -> list[Host]:
    """Hosts that are not the node of this process."""
    own = ray.get_runtime_context().get_node_id()
    return [host for host in hosts if host.node != own]


def require_here(hosts: Sequence[Host], what: str, fix: str) -> None:
    """Refuse hosts other than this process's own, for what works through its memory or files alone.

    Raises:
        UserError: what it is, the other host, and the fix.
    """
    for host in elsewhere(hosts):
        raise UserError(f"{what}, but Ray put it on host {host.address}; {fix}")


def ask_hosts(hosts: Sequence[Host], function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """See `Ask`."""
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    return get([remote.options(**host.options()).remote(*own) for host, own in zip(hosts, arguments, strict=True)])


def check_shared(folders: Mapping[str, Path], hosts: Sequence[Host], *, ask: Ask = ask_hosts) -> None:
    """Every host of a run sees what this process writes into some folders, and this process what they write.

    Folders are made where they are not there, and left as they were found otherwise.

    Args:
        folders: recipe key -> absolute path.
        hosts: nodes of the run.
        ask: how hosts are asked.

    Raises:
        UserError: the key, the folder and the host that does not share it.
    """
    others = elsewhere(hosts)
    if not others or not folders:
        return
    token = uuid.uuid4().hex
    own, made = f"{MARKER}{token}", list[Path]()
    try:
        for key, folder in folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / own).write_text(token, encoding="utf-8")
            except OSError as error:
                raise UserError(f"{key} is {folder}: cannot write there ({error.strerror}); choose another") from error
            made.append(folder)
        paths = {key: str(folder) for key, folder in folders.items()}
        arguments = [(paths, token, number, SECONDS_TO_APPEAR) for number in range(len(others))]
        for number, (host, found) in enumerate(zip(others, ask(others, leave_marker, arguments), strict=True)):
            for key, reason in found.items():
                if reason is None and not _appears(folders[key] / f"{own}-{number}", token, SECONDS_TO_APPEAR):
                    reason = "what it writes there does not arrive here"
                if reason is not None:
                    raise UserError(
                        f"{key} is {folders[key]}: host {host.address} does not share it ({reason}); a run over "
                        "several hosts needs a folder of a file system that all of them mount at the same path"
                    )
    finally:
        for folder in made:
            for path in folder.glob(f"{own}*"):
                with contextlib.suppress(OSError):
                    path.unlink()


def leave_marker(paths: Mapping[str, str], token: str, number: int, seconds: float) -> dict[str, str | None]:
    """A host's side of `check_shared`: recipe key -> what is wrong with its folder, or None."""
    found: dict[str, str | None] = {}
    for key, path in paths.items():
        marker = Path(path) / f"{MARKER}{token}"
        if not _appears(marker, token, seconds):
            seen = Path(path).is_dir()
            found[key] = "it does not see what this host writes there" if seen else "it has no such folder"
            continue
        try:
            marker.with_name(f"{marker.name}-{number}").write_text(token, encoding="utf-8")
            found[key] = None
        except OSError as error:
            found[key] = f"it cannot write there: {error.strerror}"
    return found


def check_same_model(folder: Path, hosts: Sequence[Host], *, ask: Ask = ask_hosts) -> None:
    """Every host has the checkpoint that this process has: the same files of the same sizes.

    Raises:
        UserError: a host that does not have it, with the first file that differs.
    """
    others, path = elsewhere(hosts), Path(folder).resolve()
    if not others:
        return
    own = model_files(str(path))
    for host, found in zip(others, ask(others, model_files, [(str(path),)] * len(others)), strict=True):
        for name in sorted({*own, *found}):
            if own.get(name) != found.get(name):
                raise UserError(
                    f"policy.model_name: the model is in {path} here, but host {host.address} has "
                    f"{_size(found.get(name))} for {name} (here {_size(own.get(name))}); put it where all hosts see it "
                    "at the same path, or for a model of the hub set HF_HOME to a folder that they share"
                )


def model_files(folder: str) -> dict[str, int]:
    """Name -> bytes of the files of a checkpoint folder that loading reads; empty where there is no such folder."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.endswith((".safetensors", ".json"))]
        return {name: os.stat(os.path.join(folder, name)).st_size for name in names}
    return {}


def check_programs(programs: Mapping[str, str], hosts: Sequence[Host], *, ask: Ask = ask_hosts) -> None:
    """Every host has some executable files; Ray itself would wait for ever for a process that cannot start.

    Args:
        programs: recipe key -> absolute path.

    Raises:
        UserError: the key, the file and the host without it.
    """
    others = elsewhere(hosts)
    if not others or not programs:
        return
    for key, path in programs.items():
        for host, found in zip(others, ask(others, os.path.isfile, [(path,)] * len(others)), strict=True):
            if not found:
                raise UserError(
                    f"{key}: engines run with {path}, which host {host.address} does not have; install it there or on "
                    "a file system that all hosts share"
                )


def _appears(path: Path, token: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # network file systems look again
            if path.read_text(encoding="utf-8") == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _size(found: int | None) -> str:
    return "nothing" if found is None else f"{found} bytes"
