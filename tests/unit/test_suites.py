"""Conventions of recipes and their test scripts: names, one to one, listed once, checks explained, GPU-hours."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.config.runs_here import not_implemented

ROOT = Path(__file__).resolve().parents[2]
SUITES = ROOT / "tests" / "test_suites"
SCRIPTS = sorted((SUITES / "llm").glob("*.sh"))
RECIPES = sorted((ROOT / "examples/configs/recipes/llm").glob("*.yaml"))
LISTS = ("nightly.txt", "disabled.txt")
BUDGET_GPU_HOURS = 8
"""Upper limit of one night; 5 GPU-hours are used."""
NAME = re.compile(r"(grpo)-[a-z0-9.-]+?-(\d+)n(\d+)g-((?:h200|gb200|mi355x)-)?automodel(-[a-z0-9]+)*(\.v\d+)?")
EVERY_SCRIPT = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def listed(name: str) -> list[str]:
    lines = (SUITES / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def settings() -> dict[str, dict[str, int]]:
    """Script -> its configuration block, evaluated by one bash."""
    names = ("NUM_NODES", "GPUS_PER_NODE", "STEPS_PER_RUN", "MAX_STEPS", "NUM_RUNS", "NUM_MINUTES")
    program = "set -eu\n"
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        block = text.split("# ===== BEGIN CONFIG =====")[1].split("# ===== END CONFIG =====")[0]
        program += f"{block}\necho {script.stem} {' '.join(f'${name}' for name in names)}\nunset {' '.join(names)}\n"
    shown = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines()]
    return {row[0]: dict(zip(names, map(int, row[1:]), strict=True)) for row in rows}


def test_recipes_and_scripts_are_one_to_one():
    assert [path.stem for path in SCRIPTS] == [path.stem for path in RECIPES]


def test_every_script_is_listed_once_and_every_line_is_a_script():
    everything = [line for name in LISTS for line in listed(name)]
    assert sorted(everything) == [str(path.relative_to(ROOT)) for path in SCRIPTS]
    assert set(LISTS) == {path.name for path in SUITES.glob("*.txt")}
    assert (ROOT / "nightly.txt").resolve() == SUITES / "nightly.txt"


@EVERY_SCRIPT
def test_names_say_algorithm_model_machines_and_strategy(script, settings):
    match = NAME.fullmatch(script.stem)
    assert match, f"{script.stem}: wanted grpo-<model>-<N>n<G>g-[gpu-]automodel[-modifiers][.vN]"
    config = load_config(ROOT / "examples/configs/recipes/llm" / f"{script.stem}.yaml", ["runtime=embedded"])
    own = settings[script.stem]
    assert (int(match[2]), int(match[3])) == (own["NUM_NODES"], own["GPUS_PER_NODE"])
    assert config.rollout_gpus == 0 or "noncolocated" in script.stem
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (own["NUM_NODES"], own["GPUS_PER_NODE"])
    assert own["STEPS_PER_RUN"] * own["NUM_RUNS"] >= own["MAX_STEPS"] > 0
    for gpu in ("h200", "gb200", "mi355x"):
        assert (f"-{gpu}-" in script.stem) <= (config.policy.dsv4.gpu == gpu)
    layout = config.policy.dtensor_cfg
    for axis, size in (("cp", layout.context_parallel_size), ("ep", layout.expert_parallel_size)):
        stated = re.search(rf"-(?:cp\d+)?{axis}(\d+)(?=-|ep|$)", script.stem)
        assert stated is None or int(stated[1]) == size
    mode = script.stem.rsplit("-", 1)[1]
    assert config.policy.dsv4.train_mode == (mode if mode in ("qat", "fp8") else "bf16")


@EVERY_SCRIPT
def test_beside_every_threshold_stands_what_was_measured(script):
    text = script.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.split("CHECKS=(\n")[1].split("\n)\n")[0].splitlines()]
    assert len(lines) >= 4 and len(lines) % 2 == 0
    for comment, expression in zip(lines[::2], lines[1::2], strict=True):
        assert re.match(r"# (not )?measured", comment), f"{expression}: {comment}"
        assert re.search(r"data\[\"(train|validation)/\w+\"\]", expression)
    assert os.access(script, os.X_OK) and 'source "$SCRIPT_DIR/common.env"' in text


def gpu_hours(own: dict[str, int]) -> float:
    return own["NUM_RUNS"] * own["NUM_NODES"] * own["GPUS_PER_NODE"] * own["NUM_MINUTES"] / 60


def test_a_night_stays_within_its_gpu_hours(settings):
    used = {line: gpu_hours(settings[Path(line).stem]) for line in listed("nightly.txt")}
    assert sum(used.values()) <= BUDGET_GPU_HOURS, used


def test_a_night_starts_only_runs_of_one_host():
    """Scripts of several hosts wait in disabled.txt, with what they cost; this version would start every one."""
    for name, several in (("nightly.txt", False), ("disabled.txt", True)):
        for line in listed(name):
            config = load_config(
                ROOT / "examples/configs/recipes/llm" / f"{Path(line).stem}.yaml", ["runtime=embedded"]
            )
            assert (config.cluster.num_nodes > 1) == several and not not_implemented(config, "embedded"), line


def test_what_a_disabled_script_costs_is_said(settings):
    hours = 0
    for line in (SUITES / "disabled.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and "GPU-hours" in line:
            hours = {
                int(number)
                for number in re.findall(r"(\d+) GPU-hours|(?<=\()(\d+)", line)
                for number in number
                if number
            }
        elif line and not line.startswith("#"):
            assert gpu_hours(settings[Path(line).stem]) in hours, line


def test_every_script_finds_its_recipe_and_makes_nothing_in_a_dry_run(tmp_path):
    """One bash runs all of them with TEST_DRYRUN=1; a script without a recipe fails."""
    lonely = SUITES / "llm" / "common.env"
    program = 'for script in "$@"; do TEST_DRYRUN=1 EXP_DIR="$OUT" bash "$script" || exit 1; done'
    done = subprocess.run(
        ["bash", "-c", program, "bash", *map(str, SCRIPTS)],
        env={**os.environ, "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[INFO] TEST_DRYRUN: {path.stem}" for path in SCRIPTS]
    assert not (tmp_path / "out").exists()
    wrong = subprocess.run(
        ["bash", "-c", f"source {lonely}"],
        env={**os.environ, "TEST_DRYRUN": "1", "EXP_NAME": "grpo-nothing"},
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 1 and "[ERROR] no recipe" in wrong.stderr


def test_a_script_runs_resumes_and_checks(tmp_path):
    """The way of a script, with a stand-in for Python that records what it is asked to do."""
    log = tmp_path / "calls"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/bash\necho "$*" >> {log}\ncase "$*" in *--steps*) cat {tmp_path}/steps;; esac\n')
    fake.chmod(0o755)
    script = next(path for path in SCRIPTS if path.stem.endswith("cp2ep2-qat"))
    environment = {**os.environ, "PYTHON": str(fake), "EXP_DIR": str(tmp_path / "exp")}

    def start(steps: int) -> str:
        log.write_text("")
        (tmp_path / "steps").write_text(f"{steps}\n")
        done = subprocess.run(["bash", str(script), "a.b=1"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return log.read_text()

    first = start(2)
    assert f"{script.stem}.yaml grpo.max_num_steps=5" in first and "a.b=1" in first and "--resume" not in first
    assert "logger.wandb_enabled=false" in first and "gen_kl_error" not in first
    (tmp_path / "exp/logs/exp_001").mkdir()
    assert "--resume" in start(4)
    assert "run_grpo" not in start(5)
