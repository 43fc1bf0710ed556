"""Runs of the real command line, in a folder of their own, as small as they get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.run_grpo import main

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "examples/configs/recipes/llm"
SMALL = (Path(__file__).parent / "small.overrides").read_text(encoding="utf-8").split()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the whole run is; the tiny checkpoint that all runs share is in `cache`."""
    return tmp_path_factory.mktemp("functional")


@pytest.fixture(scope="session")
def script():
    """The command of `examples/run_grpo.py`, without Python's name."""
    return ["-W", "ignore", str(REPOSITORY / "examples/run_grpo.py")]


@pytest.fixture(scope="session")
def arguments():
    """Arguments of a small run of a tiny recipe, by train mode; its folders are relative to the current one."""

    def make(mode: str, *extra: str) -> list[str]:
        recipe = RECIPES / f"grpo-dsv4-tiny-1n0g-automodel-{mode}.yaml"
        places = ("policy.dsv4.tiny.cache_dir=cache", "logger.log_dir=logs", "checkpointing.checkpoint_dir=results")
        return ["--config", str(recipe), *SMALL, *places, *extra]

    return make


@pytest.fixture(scope="session")
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture
def run_here(arguments, capfd):
    """Run within this process, whose libraries are loaded; returns the exit status and what stderr got."""

    def start(mode: str, *extra: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(arguments(mode, *extra))
        return status, capfd.readouterr().err

    return start


@pytest.fixture(scope="session")
def start_script(environment, folder):
    """Start a shell script of this folder, which runs in a folder of its own and prints into files there."""

    def start(name: str, place: Path) -> subprocess.Popen[bytes]:
        own = {"RUN_DIR": str(place), "PYTHON": sys.executable}
        cache = f"policy.dsv4.tiny.cache_dir={folder / 'cache'}"
        line = ["bash", str(REPOSITORY / "tests/functional" / name), cache]
        with open(place / "stdout", "wb") as out, open(place / "stderr", "wb") as errors:
            return subprocess.Popen(line, env={**environment, **own}, stdout=out, stderr=errors, start_new_session=True)

    return start
