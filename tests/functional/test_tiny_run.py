"""The README's command, shortened: a whole run, resume, Ctrl-C, and bad checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.main import main

pytestmark = pytest.mark.slow


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_what_it_says(run, tmp_path, monkeypatch):
    """Under `uv run` and with relative paths: Ray used to start workers in a copy without the tiny checkpoint."""
    done = run(
        "qat",
        "grpo.max_num_steps=2",
        "checkpointing.save_period=1",
        "policy.dsv4.tiny.cache_dir=cache",
        "logger.log_dir=logs",
        "checkpointing.checkpoint_dir=results",
        via_uv=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run_dir = tmp_path / "logs/exp_001"
    steps = records(run_dir)
    assert [record["step"] for record in steps] == [0, 1, 2]
    assert "validation/accuracy" in steps[0] and "validation/accuracy" in steps[2]
    for name in ("reward", "loss", "grad_norm", "lr", "gen_kl_error", "token_mult_prob_error", "approx_entropy"):
        assert f"train/{name}" in steps[1], sorted(steps[1])
    assert steps[0]["refit/quantized"] > 100 and steps[2]["refit/quantized"] > 100
    assert steps[1]["train/gen_kl_error"] < 1e-4
    for name in ("config.yaml", "rounding.json", "summary.json", "summary.png", "report.html"):
        assert (run_dir / name).stat().st_size > 0
        assert str(Path("logs") / "exp_001" / name) in done.stdout
    assert {path.name for path in (tmp_path / "results/exp_001").iterdir()} == {"step_1", "step_2"}
    assert "step 2/2" in done.stdout and "validation accuracy, last" in done.stdout
    command = "nemo-rl-dsv4 convert results/exp_001/step_2 results/exp_001/step_2-fp8 --to fp8"
    assert f"to serve it: {command}" in done.stdout
    assert command in (tmp_path / "results/exp_001/step_2/SERVE.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "logs/exp_001", "served", "--to", "fp8"]) == 0
    assert main(["inspect", "served", "--deep"]) == 0
    assert (tmp_path / "served/tokenizer.json").stat().st_size > 0


def test_resume_continues_as_if_never_stopped(run, tmp_path):
    settings = ("grpo.max_num_steps=3", "checkpointing.save_period=2", "grpo.val_at_end=false")
    whole = run("qat", *settings)
    assert whole.returncode == 0, whole.stderr[-3000:]
    # The same run as it stood when a machine failed after step 2: logged beyond its last checkpoint.
    for folder in ("logs", "results"):
        shutil.copytree(tmp_path / folder / "exp_001", tmp_path / folder / "exp_002")
    shutil.rmtree(tmp_path / "results/exp_002/step_3")
    resumed = run("qat", *settings, "--resume", str(tmp_path / "logs/exp_002"))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    expected, found = records(tmp_path / "logs/exp_001"), records(tmp_path / "logs/exp_002")
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    timing = ("timing/", "performance/", "refit/seconds")
    for left, right in zip(expected, found, strict=True):
        assert {k: v for k, v in left.items() if not k.startswith(timing)} == {
            k: v for k, v in right.items() if not k.startswith(timing)
        }


@pytest.mark.parametrize("name", sorted(path.name for path in Path(__file__).parent.glob("*.sh")))
def test_a_script_runs_and_its_checks_hold(script, name, tmp_path):
    """BF16 training disagrees with the rollout; two processes that share sequences and experts agree with it."""
    done = script(name)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    (record,) = records(tmp_path / "logs/exp_001")
    assert record["step"] == 1
    assert [line[:4] for line in done.stdout.splitlines() if "gen_kl_error" in line][-1] == "ok  "


def test_ctrl_c_leaves_nothing_half_written(command, environment, tmp_path):
    process = subprocess.Popen(
        command("qat", "grpo.max_num_steps=500", "checkpointing.save_period=1"),
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


def test_a_truncated_checkpoint_is_one_line(run, tmp_path, tiny_cache):
    if not any(tiny_cache.iterdir()):  # an earlier test has usually made it
        made = run("qat", "grpo.max_num_steps=1", "checkpointing.enabled=false", "grpo.val_at_start=false")
        assert made.returncode == 0, made.stderr[-3000:]
    source = next(path for path in tiny_cache.iterdir() if path.name.startswith("dsv4-tiny-"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in source.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    done = run("qat", f"policy.model_name={broken}", f"policy.tokenizer.name={broken}")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error:") and "safetensors" in line and str(broken) in line
    assert not (tmp_path / "logs/exp_002").exists()
