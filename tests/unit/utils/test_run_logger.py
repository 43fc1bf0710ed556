"""Run folders and metrics on disk: concurrent starts, crashes, resuming."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.metrics_file import append_step, keep_steps_up_to, read_steps
from nemo_rl_dsv4.utils.run_folder import find_run, make_run_folder, next_run_name, write_whole
from nemo_rl_dsv4.utils.run_logger import RunLogger

QUIET = {"tensorboard_enabled": False, "wandb_enabled": False, "mlflow_enabled": False}


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_folder(tmp_path):
    logger = RunLogger(tmp_path / "logs", "a: 1\n", QUIET)
    logger.log_step(0, {"validation/accuracy": 0.25})
    logger.log_step(1, {"train/reward": np.float32(0.5), "train/count": 3, "train/flag": True})
    assert logger.run_dir == tmp_path / "logs" / "exp_001"
    assert (logger.run_dir / "config.yaml").read_text() == "a: 1\n"
    assert lines(logger.run_dir) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.5, "train/count": 3.0, "train/flag": 1.0},
    ]


def test_numbers_go_on_after_the_highest_and_other_names_are_ignored(tmp_path):
    for name in ("exp_001", "exp_041", "exp_7", "experiment_100", "exp_042.bak"):
        (tmp_path / name).mkdir()
    assert next_run_name(tmp_path) == "exp_042"
    assert make_run_folder(tmp_path).name == "exp_042"
    (tmp_path / "exp_999").mkdir()
    assert make_run_folder(tmp_path).name == "exp_1000"
    assert next_run_name(tmp_path) == "exp_1001"


def test_concurrent_threads_get_different_numbers(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: make_run_folder(tmp_path / "logs"), range(48)))
    assert sorted(f.name for f in folders) == [f"exp_{n:03d}" for n in range(1, 49)]


def test_concurrent_processes_get_different_numbers(tmp_path):
    code = (
        "import sys; from pathlib import Path; from nemo_rl_dsv4.utils.run_folder import make_run_folder\n"
        "for _ in range(20): print(make_run_folder(Path(sys.argv[1])).name)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    names = [name for process in running for name in process.communicate()[0].split()]
    assert sorted(names) == [f"exp_{n:03d}" for n in range(1, 61)]


def test_steps_must_go_up(tmp_path):
    logger = RunLogger(tmp_path, "", QUIET)
    logger.log_step(3, {"x": 1.0})
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} was logged after step 3"):
            logger.log_step(step, {"x": 1.0})
    assert [record["step"] for record in lines(logger.run_dir)] == [3]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    path = tmp_path / "m.jsonl"
    append_step(path, 1, {"a": math.nan, "b": math.inf, "c": 1e-300})
    assert json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1e-300,
    }


def test_a_line_that_a_crash_cut_is_dropped_and_the_file_goes_on(tmp_path):
    """A resumed run used to glue its first record to half a line that a crash had left."""
    path = tmp_path / "m.jsonl"
    for step in (1, 2):
        append_step(path, step, {"x": step})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "x"')
    assert [r["step"] for r in read_steps(path)] == [1, 2]
    assert keep_steps_up_to(path, 10) == 2
    append_step(path, 3, {"x": 3})
    assert [r["step"] for r in read_steps(path)] == [1, 2, 3]


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"x": 1}', '{"step": "one"}'])
def test_damage_inside_the_file_is_named_with_its_line(tmp_path, damage):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"m.jsonl: line 2 is n"):
        read_steps(path)


def test_resuming_repeats_no_step_and_keeps_the_folder(tmp_path):
    first = RunLogger(tmp_path, "seed: 1\n", QUIET)
    for step in range(6):
        first.log_step(step, {"x": step})
    again = RunLogger.resume(first.run_dir, "seed: 1\n", last_step=3, settings=QUIET)
    assert again.run_dir == first.run_dir and sorted(p.name for p in tmp_path.iterdir()) == ["exp_001"]
    with pytest.raises(ValueError, match="steps must go up"):
        again.log_step(3, {"x": 1.0})
    for step in (4, 5, 6):
        again.log_step(step, {"x": 10 * step})
    assert [(r["step"], r["x"]) for r in lines(first.run_dir)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
        (6, 60),
    ]


def test_resuming_with_another_recipe_keeps_the_old_one(tmp_path):
    first = RunLogger(tmp_path, "seed: 1\n", QUIET)
    first.log_step(1, {"x": 1})
    RunLogger.resume(first.run_dir, "seed: 1\n", last_step=1, settings=QUIET)
    assert sorted(p.name for p in first.run_dir.iterdir()) == ["config.yaml", "metrics.jsonl"]
    RunLogger.resume(first.run_dir, "seed: 2\n", last_step=1, settings=QUIET)
    assert (first.run_dir / "config.yaml").read_text() == "seed: 2\n"
    assert (first.run_dir / "config.before_step_2.yaml").read_text() == "seed: 1\n"


def test_a_run_that_logged_nothing_leaves_nothing(tmp_path):
    logger = RunLogger(tmp_path, "", QUIET)
    assert logger.discard_if_empty() and list(tmp_path.iterdir()) == []
    logger = RunLogger(tmp_path, "", QUIET)
    logger.log_step(1, {"x": 1})
    assert not logger.discard_if_empty() and logger.run_dir.is_dir()


def test_resuming_never_discards_what_was_there(tmp_path):
    first = RunLogger(tmp_path, "", QUIET)
    first.log_step(1, {"x": 1})
    assert not RunLogger.resume(first.run_dir, "", last_step=1, settings=QUIET).discard_if_empty()
    assert lines(first.run_dir) == [{"step": 1, "x": 1.0}]


def test_a_log_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make a run folder there .*; choose another"):
        RunLogger(tmp_path / "file" / "logs", "")


def test_tensorboard_events_and_what_a_resumed_run_hides(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = RunLogger(tmp_path, "")
    for step in (1, 2, 3):
        first.log_step(step, {"train/reward": step / 4, "train/broken": math.nan})
    first.close()
    again = RunLogger.resume(first.run_dir, "", last_step=2)
    again.log_step(3, {"train/reward": 9.0})
    again.close()
    events = EventAccumulator(str(first.run_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert events.Tags()["scalars"] == ["train/reward"]


def test_finish_says_where_everything_is(tmp_path):
    logger = RunLogger(tmp_path, "seed: 1\n", QUIET)
    logger.log_step(1, {"train/reward": 0.5})
    files = logger.finish({"accuracy": 0.5, "steps": 1})
    assert set(files) == {"configuration", "summary", "metrics", "plots", "report"}
    assert all(path.is_file() and path.parent == logger.run_dir for path in files.values())
    assert json.loads(files["summary"].read_text()) == {"accuracy": 0.5, "steps": 1}
    assert sorted(p.name for p in logger.run_dir.iterdir()) == sorted(p.name for p in files.values())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_whole(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_the_newest_run_is_found_by_number(tmp_path):
    for name in ("exp_002", "exp_010", "exp_009"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
    assert find_run("", tmp_path) == tmp_path / "exp_010"
    assert find_run(str(tmp_path / "exp_002"), tmp_path) == tmp_path / "exp_002"
    with pytest.raises(UserError, match="is no folder"):
        find_run(str(tmp_path / "exp_003"), tmp_path)
