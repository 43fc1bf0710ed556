"""All tensors of a checkpoint folder: the index against its shards, and every shard's header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_dsv4.model.checkpoint.problems import Problem
from nemo_rl_dsv4.model.safetensors_file import StoredTensor, scan_header, unique_keys
from nemo_rl_dsv4.regular_file import require_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Shards:
    """What a folder's headers say.

    Attributes:
        directory: the folder.
        tensors: by name; of a damaged shard only those that can be read.
        problems: findings about the index and the shards.
        unreadable: names that the index puts into a shard that is missing or damaged.
        complete: False where it is unknown which tensors a damaged file should hold.
        stray: safetensors files that the index does not name.
        bytes: size of all shards.
    """

    directory: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    complete: bool = True
    stray: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    bytes: int = 0

    @property
    def listing(self) -> str:
        """The file that says which tensors there are: the index, or the only shard."""
        return INDEX if (self.directory / INDEX).exists() else SINGLE


def scan_shards(directory: Path) -> Shards:
    """Read the index and all headers of `directory`; damage becomes `problems`, nothing is raised."""
    shards = Shards(Path(directory))
    index = shards.directory / INDEX
    if index.exists():
        weight_map = _read_index(shards, index)
        if weight_map is None:
            return shards
        for file in sorted(set(weight_map.values())):
            _scan_indexed(shards, file, weight_map)
    else:
        shards.files = [SINGLE]
        header = scan_header(shards.directory / SINGLE)
        shards.tensors = header.tensors
        shards.problems += [Problem(SINGLE, found.tensor, found.message) for found in header.problems]
        shards.complete = not header.problems
    if shards.directory.is_dir():
        shards.stray = sorted(p.name for p in shards.directory.glob("*.safetensors") if p.name not in shards.files)
    shards.bytes = sum(os.path.getsize(path) for f in shards.files if os.path.isfile(path := shards.directory / f))
    return shards


def _read_index(shards: Shards, index: Path) -> dict[str, str] | None:
    def problem(message: str, tensor: str | None = None) -> None:
        shards.problems.append(Problem(INDEX, tensor, f"{index}: {message}"))

    try:
        require_regular(index)
        content = json.loads(index.read_bytes(), object_pairs_hook=unique_keys)
        weight_map = content["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError(f"weight_map is {weight_map!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem(f"cannot be read as an index with a weight_map ({error!r})")
        shards.complete = False
        return None
    good = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and Path(file).name == file and file not in ("", ".", ".."):
            good[name] = file
        else:
            problem(f"names the shard {file!r} for {name!r}; wanted a file name in {shards.directory}", name)
            shards.unreadable.add(name)
    return good


def _scan_indexed(shards: Shards, file: str, weight_map: Mapping[str, str]) -> None:
    path = shards.directory / file
    wanted = {name for name, place in weight_map.items() if place == file}
    shards.files.append(file)
    header = scan_header(path)
    if not os.path.exists(path):  # unlike Path.exists, never raises for a name the system refuses
        text = f"{path}: the file is missing; {INDEX} puts {len(wanted)} tensors there, such as {min(wanted)!r}"
        shards.problems.append(Problem(file, None, f"{text}; fetch it"))
        shards.unreadable |= wanted
        return
    shards.problems += [Problem(file, found.tensor, found.message) for found in header.problems]
    for name, tensor in header.tensors.items():
        if name in wanted:
            shards.tensors[name] = tensor
        else:
            place = weight_map.get(name)
            message = f"{path}: tensor {name!r} unexpected; {INDEX} puts it in {place!r}"
            shards.problems.append(Problem(file, name, message))
    missing = wanted - set(header.tensors)
    if header.problems:
        shards.unreadable |= missing
        return
    for name in sorted(missing):
        shards.problems.append(Problem(file, name, f"{path}: tensor {name!r} missing; {INDEX} lists it there"))
        shards.unreadable.add(name)
