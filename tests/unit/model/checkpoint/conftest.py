"""A small release-format checkpoint to check, damage, load and convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_dsv4.model.release_writer import write_release_checkpoint

State = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory, training_once: State, config_once: dict[str, Any]) -> Path:
    """FP4 experts, FP8 elsewhere, in several shards; do not change it in a test."""
    folder = tmp_path_factory.mktemp("sharded") / "release"
    write_release_checkpoint(training_once, config_once, folder, max_shard_bytes=600_000)
    return folder


@pytest.fixture
def folder(tmp_path: Path, sharded: Path) -> Path:
    """A copy for a test that damages it."""
    return Path(shutil.copytree(sharded, tmp_path / "release"))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """Replace one stored tensor, or remove it and its index entry (None); returns its shard."""
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    changed = change(tensors[name].clone())
    index = json.loads((folder / INDEX).read_text())
    if changed is None:
        del tensors[name], index["weight_map"][name]
    else:
        tensors[name] = changed
    save_file(tensors, shard)
    (folder / INDEX).write_text(json.dumps(index))
    return shard


def add_tensors(folder: Path, added: State, file: str = "extra.safetensors") -> None:
    """Add a shard with more tensors."""
    save_file(added, folder / file)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(added, file)
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
