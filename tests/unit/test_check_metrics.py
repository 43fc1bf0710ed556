"""tests/check_metrics.py: metrics of every form, expressions and nothing but expressions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.guard import guarded

FILE = Path(__file__).resolve().parents[1] / "check_metrics.py"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("check_metrics", FILE)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


SERIES = {step: {"train/loss": 1.0, "train/kl": value} for step, value in enumerate((0.5, 0.1, 0.3, 0.2), 1)}


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "exp_001"
    folder.mkdir()
    lines = [json.dumps({"step": 0, "validation/accuracy": 0.25})]
    lines += [json.dumps({"step": step, **metrics}) for step, metrics in SERIES.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ('mean(data["train/kl"]) < 0.3', True),
        ('mean(data["train/kl"]) < 0.2', False),
        ('mean(data["train/kl"], 2) == 0.2', False),
        ('mean(data["train/kl"], 2, 3) == 0.1', True),
        ('mean(data["train/kl"], -2) == 0.25', True),
        ('mean(data["train/kl"], range_start=2, range_end=-1) == 0.1', False),
        ('median(data["train/kl"]) == 0.25', True),
        ('0 < min(data["train/kl"]) <= 0.1', True),
        ('max(data["train/kl"]) - last(data["train/kl"]) > 0.29', True),
        ('last(data["validation/accuracy"]) > -1', True),
    ],
)
def test_an_expression_is_evaluated(module, run_dir, capsys, expression, holds):
    assert module.run([str(run_dir), expression]) == (0 if holds else 1)
    assert capsys.readouterr().out.startswith("ok  " if holds else "FAIL")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('mean(data["train/kl"])', "compares nothing"),
        ('mean(data["train/k1"]) < 1', "has no metric 'train/k1'; it has train/kl, train/loss"),
        ('__import__("os").getpid() > 0', "is not evaluated"),
        ('mean(data["train/kl"], 9) < 1', "no step from 9"),
        ("mean(kl) < 1", "is no metric"),
        ('mean(data["train/kl"]) != 1', "only <, <=, >, >= and =="),
        ("1 / 0 < 1", "divides by zero"),
        ('last(data["train/kl"], 2) < 1', "does not take that"),
        ("1 <", "is no expression"),
        ('mean(data["train/kl"], 1e999) < 1', "range_start is inf; wanted a whole number of steps"),
        ('mean(data["train/kl"], 1.5) < 1', "range_start is 1.5; wanted a whole number of steps"),
        ("1" + "+1" * 5000 + " < 2", "is no expression|parts"),
    ],
)
def test_anything_else_is_bad_input(module, run_dir, capsys, expression, message):
    assert guarded(lambda: module.run([str(run_dir), expression])) == 2
    said = capsys.readouterr().err
    assert any(words in said for words in message.split("|")) and said.count("\n") == 1


def test_steps_and_newest_run_and_json(module, run_dir, capsys):
    assert module.run([str(run_dir.parent), "--steps"]) == 0
    assert capsys.readouterr().out == "4\n"
    assert module.run([str(run_dir.parent), "--json", 'last(data["train/kl"]) < 0.1']) == 1
    (row,) = json.loads(capsys.readouterr().out)["checks"]
    assert row == {"expression": 'last(data["train/kl"]) < 0.1', "holds": False, "numbers": [0.2, 0.1]}


def test_nemo_rls_forms_are_read_alike(module, tmp_path):
    """A dump {metric: {step: value}}, and the TensorBoard events that it is made from."""
    from torch.utils.tensorboard import SummaryWriter

    dump = tmp_path / "metrics.json"
    dump.write_text(json.dumps({"train/kl": {str(step): row["train/kl"] for step, row in SERIES.items()}}))
    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step, row in SERIES.items():
            writer.add_scalar("train/kl", row["train/kl"], step)
    expected = {step: row["train/kl"] for step, row in SERIES.items()}
    assert module.read_metrics(dump)["train/kl"] == expected
    assert module.read_metrics(tmp_path / "events")["train/kl"] == pytest.approx(expected)


def test_a_folder_without_metrics_is_named(module, tmp_path, capsys):
    assert guarded(lambda: module.run([str(tmp_path), "1 < 2"])) == 2
    assert "neither metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("function", ["min", "max", "mean", "median"])
def test_a_step_that_is_no_number_fails_every_check(module, tmp_path, capsys, bad, function):
    """A run writes null for NaN; the checks left such steps out and passed on the others."""
    lines = [json.dumps({"step": step, "train/kl": None if step == bad else 0.1}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for sign in ("<", ">="):
        assert module.run([str(tmp_path), f'{function}(data["train/kl"]) {sign} 1']) == 1
        assert "[nan, 1]" in capsys.readouterr().out


def test_a_dump_nested_without_end_and_a_missing_run_are_one_line(module, tmp_path, capsys):
    (tmp_path / "metrics.json").write_text("[" * 100_000)
    for words in ([str(tmp_path / "metrics.json"), "1 < 2"], []):
        assert guarded(lambda words=words: module.run(words)) == 2
        assert capsys.readouterr().err.count("\n") == 1
