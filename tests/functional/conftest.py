"""Runs of the real command line, in a folder of their own, as small as they get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "examples/configs/recipes/llm"
SMALL = (Path(__file__).parent / "small.overrides").read_text(encoding="utf-8").split()


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
    """One tiny checkpoint for all runs."""
    return tmp_path_factory.mktemp("tiny-checkpoints")


@pytest.fixture
def command(tmp_path, tiny_cache):
    """Command line of a small run of a tiny recipe in `tmp_path`, by train mode."""

    def make(mode: str, *extra: str) -> list[str]:
        recipe = RECIPES / f"grpo-dsv4-tiny-1n0g-automodel-{mode}.yaml"
        overrides = [
            *SMALL,
            f"policy.dsv4.tiny.cache_dir={tiny_cache}",
            f"logger.log_dir={tmp_path}/logs",
            f"checkpointing.checkpoint_dir={tmp_path}/results",
        ]
        return [
            sys.executable,
            "-W",
            "ignore",
            str(REPOSITORY / "examples/run_grpo.py"),
            "--config",
            str(recipe),
            *overrides,
            *extra,
        ]

    return make


@pytest.fixture
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture
def run(command, environment, tmp_path):
    """Run to the end and return the finished process; `via_uv` starts it as README does."""

    def start(mode: str, *extra: str, via_uv: bool = False) -> subprocess.CompletedProcess[str]:
        line = command(mode, *extra)
        if via_uv:
            uv = shutil.which("uv")
            assert uv, "README's commands start with `pip install uv`"
            line = [uv, "run", "--no-sync", "--project", str(REPOSITORY), *line[1:]]
            line.remove("-W")
            line.remove("ignore")
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)

    return start


@pytest.fixture
def script(environment, tmp_path, tiny_cache):
    """Run a shell script of this folder to its end and return the finished process."""

    def start(name: str, *extra: str) -> subprocess.CompletedProcess[str]:
        own = {"RUN_DIR": str(tmp_path), "PYTHON": sys.executable}
        line = ["bash", str(REPOSITORY / "tests/functional" / name), f"policy.dsv4.tiny.cache_dir={tiny_cache}", *extra]
        return subprocess.run(line, env={**environment, **own}, capture_output=True, text=True, timeout=400)

    return start
