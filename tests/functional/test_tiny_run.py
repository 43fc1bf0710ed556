"""The README's command, shortened: a whole run, resume, Ctrl-C, and bad checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.main import main

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in Path(__file__).parent.glob("*.sh"))
WHOLE = ("grpo.max_num_steps=3", "checkpointing.save_period=2")


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole_run(arguments, script, environment, folder):
    """A run as README starts it: under `uv run` and with relative paths, from no tiny checkpoint on."""
    uv = shutil.which("uv")
    assert uv, "README's commands start with `pip install uv`"
    line = [uv, "run", "--no-sync", "--project", str(REPOSITORY), script[-1], *arguments("qat", *WHOLE)]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_run_writes_what_it_says(whole_run, folder, monkeypatch):
    """With relative paths under `uv run` Ray used to start workers in a copy without the tiny checkpoint."""
    run_dir = folder / "logs/exp_001"
    steps = records(run_dir)
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    assert "validation/accuracy" in steps[0] and "validation/accuracy" in steps[3]
    for name in ("reward", "loss", "grad_norm", "lr", "gen_kl_error", "token_mult_prob_error", "approx_entropy"):
        assert f"train/{name}" in steps[1], sorted(steps[1])
    assert steps[0]["refit/quantized"] > 100 and steps[3]["refit/quantized"] > 100
    assert steps[1]["train/gen_kl_error"] < 1e-4
    for name in ("config.yaml", "rounding.json", "summary.json", "summary.png", "report.html"):
        assert (run_dir / name).stat().st_size > 0
        assert str(Path("logs") / "exp_001" / name) in whole_run
    assert {path.name for path in (folder / "results/exp_001").iterdir()} == {"step_2", "step_3"}
    assert "step 3/3" in whole_run and "validation accuracy, last" in whole_run
    command = "nemo-rl-dsv4 convert results/exp_001/step_3 results/exp_001/step_3-fp8 --to fp8"
    assert f"to serve it: {command}" in whole_run
    assert command in (folder / "results/exp_001/step_3/SERVE.md").read_text()
    monkeypatch.chdir(folder)
    assert main(["convert", "logs/exp_001", "served", "--to", "fp8"]) == 0
    assert main(["inspect", "served", "--deep"]) == 0
    assert (folder / "served/tokenizer.json").stat().st_size > 0


def test_resume_continues_as_if_never_stopped(whole_run, run_here, folder, monkeypatch):
    # The same run as it stood when a machine failed after step 2: logged beyond its last checkpoint.
    for part in ("logs", "results"):
        shutil.copytree(folder / part / "exp_001", folder / part / "exp_002")
    shutil.rmtree(folder / "results/exp_002/step_3")
    monkeypatch.chdir(folder)
    status, errors = run_here("qat", *WHOLE, "--resume", str(folder / "logs/exp_002"))
    assert status == 0, errors[-3000:]
    expected, found = records(folder / "logs/exp_001"), records(folder / "logs/exp_002")
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    timing = ("timing/", "performance/", "refit/seconds")
    for left, right in zip(expected, found, strict=True):
        assert {k: v for k, v in left.items() if not k.startswith(timing)} == {
            k: v for k, v in right.items() if not k.startswith(timing)
        }


@pytest.fixture(scope="module")
def scripts(start_script, tmp_path_factory):
    """Folder and process of every script. They run side by side: most of each is one process that imports libraries."""
    places = {name: tmp_path_factory.mktemp(Path(name).stem) for name in SCRIPTS}
    started = {name: (place, start_script(name, place)) for name, place in places.items()}
    yield started
    for _, process in started.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_its_checks_hold(scripts, name):
    """BF16 training disagrees with the rollout; two processes that share sequences and experts agree with it."""
    place, process = scripts[name]
    status = process.wait(timeout=400)
    printed, errors = (place / "stdout").read_text(), (place / "stderr").read_text()
    assert status == 0, printed[-1500:] + errors[-1500:]
    (record,) = records(place / "logs/exp_001")
    assert record["step"] == 1
    assert [line[:4] for line in printed.splitlines() if "gen_kl_error" in line][-1] == "ok  "


def test_ctrl_c_leaves_nothing_half_written(arguments, script, environment, tmp_path, folder):
    places = (f"policy.dsv4.tiny.cache_dir={folder / 'cache'}", "grpo.max_num_steps=500", "checkpointing.save_period=1")
    process = subprocess.Popen(
        [sys.executable, *script, *arguments("qat", *places)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    results = tmp_path / "results/exp_001"
    deadline = time.monotonic() + 300
    while not (results / "step_2").is_dir():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-3000:]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in errors
    assert all(path.name.startswith("step_") for path in results.iterdir())
    assert len(records(tmp_path / "logs/exp_001")) >= 3


def test_a_truncated_checkpoint_is_one_line(whole_run, run_here, tmp_path, folder, monkeypatch):
    (source,) = (folder / "cache").glob("dsv4-tiny-*")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in source.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    monkeypatch.chdir(tmp_path)
    status, errors = run_here("qat", f"policy.model_name={broken}", f"policy.tokenizer.name={broken}")
    assert status == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("error:") and "safetensors" in line and str(broken) in line
    assert not (tmp_path / "logs/exp_001").exists()
