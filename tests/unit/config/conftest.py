"""Recipes of the repository, and a way to write small ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
RECIPES = CONFIGS / "recipes" / "llm"


@pytest.fixture
def base_file() -> Path:
    """The file that lists every key."""
    return CONFIGS / "grpo_dsv4.yaml"


@pytest.fixture
def tiny() -> Path:
    """The CPU recipe."""
    return RECIPES / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a YAML file, folders included, below the test's folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
