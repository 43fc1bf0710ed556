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
SMALL = [
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=8",
    "grpo.val_batch_size=8",
    "policy.train_global_batch_size=8",
    "policy.generation.max_new_tokens=6",
    "policy.generation.reference_cfg.num_workers=1",
    "policy.dsv4.cpu_processes=1",
    "policy.dsv4.tiny.warm_start.steps=1",
    "policy.dsv4.tiny.warm_start.batch_size=4",
    "data.train.size=64",
    "data.validation.size=8",
]


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
