"""Recipes of the repository are read once."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
from omegaconf import DictConfig

from nemo_rl_dsv4.config import inheritance

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
read = inheritance._read


@functools.cache
def layer_of(path: Path, shown: Path) -> DictConfig:
    return read(path, shown, ())


@pytest.fixture(autouse=True)
def recipes_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test changes them, hundreds load them, and most of that time goes into parsing YAML."""

    def read_once(path: Path, shown: Path, chain: tuple[Path, ...]) -> DictConfig:
        if path.is_relative_to(CONFIGS) and path.is_file():
            return copy.deepcopy(layer_of(path, shown))
        return read(path, shown, chain)

    monkeypatch.setattr(inheritance, "_read", read_once)
