"""The files of one checkpoint, and how damage is found: a manifest with size and SHA-256 of every file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular
from nemo_rl_dsv4.utils.file_digest import sha256_of_all

INFO, CONFIG, MANIFEST, POLICY = "training_info.json", "config.yaml", "manifest.json", "policy"
STATE = f"{POLICY}/.metadata"
"""Of torch's distributed checkpoint: without it no weight can be found."""


def read_checkpoint(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest and return training_info.json.

    Args:
        folder: a `step_N` folder.
        hashes: False compares sizes only.

    Raises:
        UserError: names the file that is missing, truncated or changed, or that the manifest leaves out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} does not exist")
    manifest = _read_json(folder / MANIFEST)
    damaged = f"checkpoint {folder} is damaged:"
    required = [INFO, STATE, *([CONFIG] if os.path.lexists(folder / CONFIG) else [])]
    unlisted = [name for name in required if name not in manifest]
    if unlisted:
        raise UserError(f"{damaged} {MANIFEST} does not list {unlisted[0]}; take another step's checkpoint")
    for name, wanted in manifest.items():
        if not isinstance(wanted, dict) or not isinstance(wanted.get("bytes"), int):
            raise UserError(f"{damaged} {MANIFEST} has no size of {name}")
        if not isinstance(wanted.get("sha256"), str):
            raise UserError(f"{damaged} {MANIFEST} has no sha256 of {name}")
        path = folder / name
        if not path.is_file():
            raise UserError(f"{damaged} {name} is missing")
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise UserError(f"{damaged} {name} has {size} bytes, {wanted['bytes']} were written")
    if hashes:
        hashed = {folder / name: wanted["sha256"] for name, wanted in manifest.items()}
        try:
            found = sha256_of_all(hashed)
        except OSError as error:
            raise UserError(f"{damaged} {error}") from error
        for path, wanted in hashed.items():
            if found[path] != wanted:
                name = path.relative_to(folder).as_posix()
                raise UserError(f"{damaged} the content of {name} is not what was written")
    return _read_json(folder / INFO)


def last_whole_checkpoint(folder: Path, *, hashes: bool = True) -> tuple[Path, list[str]]:
    """Find the newest `step_N` in a run's checkpoint folder that `read_checkpoint` accepts; changes nothing there.

    Returns:
        The step's folder, and what is wrong with newer ones.

    Raises:
        UserError: there is none.
    """
    steps = [path for path in Path(folder).glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    damaged: list[str] = []
    for step in sorted(steps, key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        try:
            read_checkpoint(step, hashes=hashes)
        except UserError as error:
            damaged.append(str(error))
        else:
            return step, damaged
    why = "; ".join(damaged) or "no step_N folder"
    raise UserError(f"{folder} holds no whole training checkpoint: {why}")


def write_manifest(folder: Path, known: Mapping[str, str]) -> None:
    """Write manifest.json over all files of `folder`.

    Args:
        folder: a checkpoint whose other files are complete.
        known: SHA-256 by relative name, where the process that wrote a file has hashed it already.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    found = sha256_of_all(path for path in paths if names[path] not in known)
    manifest = {
        names[path]: {"bytes": path.stat().st_size, "sha256": known.get(names[path]) or found[path]} for path in paths
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        require_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {path.parent} is damaged or no checkpoint: {path.name} is missing") from error
    except OSError as error:
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"checkpoint {path.parent} is damaged: {path.name} holds no JSON object")
    return content
