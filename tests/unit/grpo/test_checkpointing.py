import hashlib
import json
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import read_checkpoint
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore, latest_of_runs
from nemo_rl_dsv4.grpo.settings import CheckpointSettings
from nemo_rl_dsv4.utils.random_state import restore_rng_state, rng_state, seed_all


def make_policy(folder: Path) -> None:
    """The least that counts as a policy's checkpoint."""
    folder.mkdir()
    (folder / ".metadata").touch()


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write(store: CheckpointStore, step: int, **info) -> Path:
    def save(folder: Path) -> None:
        (folder / "weights").mkdir(parents=True)
        (folder / ".metadata").touch()
        (folder / "weights" / "part.bin").write_bytes(bytes([step]) * 1000)

    folder = store.write(step, {"step": step, **info}, save, config_yaml=f"step: {step}\n")
    store.wait()
    return folder


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_and_read_back(tmp_path):
    folder = write(CheckpointStore(tmp_path / "new" / "folder", CheckpointSettings()), 3, consumed_samples=96)
    assert read_checkpoint(folder) == {"step": 3, "consumed_samples": 96}
    assert (folder / "config.yaml").read_text() == "step: 3\n"
    assert steps(folder.parent) == ["step_3"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "policy/weights/part.bin").write_bytes(b"x" * 999),
            "part.bin has 999 bytes, 1000 were written",
        ),
        (lambda f: (f / "policy/weights/part.bin").write_bytes(b"x" * 1000), "content of policy/weights/part.bin"),
        (lambda f: (f / "policy/weights/part.bin").unlink(), "part.bin is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not JSON"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text("[]"), "holds no JSON object"),
        (
            lambda f: edit_manifest(f, lambda m: m.update({"training_info.json": 5})),
            "has no size of training_info.json",
        ),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json does not list training_info.json"),
        (lambda f: edit_manifest(f, lambda m: m.pop("policy/.metadata")), "does not list policy/.metadata"),
        (lambda f: edit_manifest(f, lambda m: m.pop("config.yaml")), "does not list config.yaml"),
        (
            lambda f: edit_manifest(f, lambda m: m["policy/weights/part.bin"].pop("sha256")),
            "has no sha256 of policy/weights/part.bin",
        ),
        (lambda f: replace_by_folder(f / "manifest.json"), "manifest.json cannot be read .*Is a directory"),
    ],
)
def test_damage_is_named_and_the_previous_checkpoint_is_used(tmp_path, caplog, damage, message):
    """Whatever is wrong with the newest checkpoint, resuming takes the one before, with a warning that says why.

    A manifest that was empty, left out the policy, or had no hashes used to make any folder whole; one that was a
    folder ended in a traceback.
    """
    store = CheckpointStore(tmp_path, CheckpointSettings(keep_top_k=1))
    store.settings = CheckpointSettings()
    write(store, 1)
    newest = write(store, 2)
    damage(newest)
    with pytest.raises(UserError, match=message):
        read_checkpoint(newest)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == tmp_path / "step_1"
    assert "step_2" in caplog.text and "damaged" in caplog.text


def test_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    """keep_top_k 1 with a damaged newer checkpoint must not delete the only good one."""
    store = CheckpointStore(tmp_path, CheckpointSettings(keep_top_k=1))
    write(store, 1)
    damaged = tmp_path / "step_5"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    write(store, 2)
    assert steps(tmp_path) == ["step_2", "step_5"]
    assert store.latest() == tmp_path / "step_2"


def test_nothing_whole_to_resume_from(tmp_path):
    with pytest.raises(UserError, match="no whole checkpoint"):
        CheckpointStore(tmp_path / "missing", CheckpointSettings()).latest()
    with pytest.raises(UserError, match="does not exist"):
        read_checkpoint(tmp_path / "step_9")


def test_newest_run_that_has_a_checkpoint(tmp_path):
    """exp_010 comes after exp_009, and a newer run that never saved is passed over."""
    settings = CheckpointSettings()
    with pytest.raises(UserError, match="no run with a whole checkpoint"):
        latest_of_runs(tmp_path, settings)
    for run, step in (("exp_009", 30), ("exp_010", 2)):
        write(CheckpointStore(tmp_path / run, settings), step)
    (tmp_path / "exp_011" / "tmp_step_4").mkdir(parents=True)
    assert latest_of_runs(tmp_path, settings) == tmp_path / "exp_010" / "step_2"


def test_keep_top_k_by_metric_keeps_the_newest_too(tmp_path):
    """Two best by accuracy, ties to the newer; the newest survives even when it is the worst."""
    settings = CheckpointSettings(keep_top_k=2, metric_name="val:accuracy")
    store = CheckpointStore(tmp_path, settings)
    for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.9), (10, 0.1)]:
        write(store, step, **{"val:accuracy": accuracy})
    assert steps(tmp_path) == ["step_10", "step_2", "step_3"]
    write(store, 11)
    assert steps(tmp_path) == ["step_11", "step_2", "step_3"]


def test_keep_top_k_lower_is_better_and_by_age(tmp_path):
    lower = CheckpointStore(
        tmp_path / "a", CheckpointSettings(keep_top_k=1, metric_name="train:loss", higher_is_better=False)
    )
    for step, loss in [(1, 0.1), (2, 0.3), (3, 0.2)]:
        write(lower, step, **{"train:loss": loss})
    assert steps(tmp_path / "a") == ["step_1", "step_3"]
    by_age = CheckpointStore(tmp_path / "b", CheckpointSettings(keep_top_k=2))
    for step in (8, 9, 10):
        write(by_age, step)
    assert steps(tmp_path / "b") == ["step_10", "step_9"]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    """A kill -9 in the middle of a write, of a removal, or between the two renames of a replacement."""
    store = CheckpointStore(tmp_path, CheckpointSettings())
    write(store, 1)
    (tmp_path / "step_1").rename(tmp_path / "old_step_1")
    for name in ("tmp_step_2", "tmp_delete_step_7"):
        (tmp_path / name / "policy").mkdir(parents=True)
    assert store.latest() == tmp_path / "step_1"
    assert steps(tmp_path) == ["step_1"]


def test_step_written_again_replaces_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointSettings())
    write(store, 1, run="first")
    write(store, 1, run="second")
    assert read_checkpoint(tmp_path / "step_1")["run"] == "second"
    assert steps(tmp_path) == ["step_1"]


def test_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write the checkpoint of step 1 .*checkpoint_dir"):
        write(CheckpointStore(blocked, CheckpointSettings()), 1)


def test_information_that_is_not_json_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        write(CheckpointStore(tmp_path, CheckpointSettings()), 1, broken=float("nan"))
    assert steps(tmp_path) == []


def test_random_state_round_trips_through_json():
    """Python's, numpy's and torch's next numbers are the same after a save, other draws, and a restore."""

    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(1).item()

    random.gauss(0, 1)
    np.random.randn()
    saved = json.loads(json.dumps(rng_state()))
    expected = draw()
    draw()
    restore_rng_state(saved)
    assert draw() == expected


@pytest.mark.parametrize(
    "values", [{"metric_name": "accuracy"}, {"keep_top_k": 0}, {"checkpoint_must_save_by": "4h"}, {"save_period": 0}]
)
def test_bad_settings_are_named(values):
    with pytest.raises(UserError, match=next(iter(values))):
        CheckpointSettings(**values)


def test_training_goes_on_while_files_are_written(tmp_path):
    """The write returns with the state copied; the folder appears when it is whole; the next write waits its turn."""
    store = CheckpointStore(tmp_path, CheckpointSettings(async_save=True, keep_top_k=1))
    write(store, 1)
    release, order = threading.Event(), []

    def save(folder: Path):
        make_policy(folder)

        def finish() -> dict[str, str]:
            release.wait(20)
            (folder / "part.bin").write_bytes(b"late")
            order.append("first written")
            return {"part.bin": hashlib.sha256(b"late").hexdigest()}

        return finish

    assert store.write(2, {"step": 2}, save) == tmp_path / "step_2"
    assert [checkpoint.step for checkpoint in store.all()] == [1], "half a checkpoint does not count, and is left alone"
    assert steps(tmp_path) == ["step_1", "tmp_step_2"]
    threading.Timer(0.1, release.set).start()
    store.write(3, {"step": 3}, lambda folder: order.append("second begun") or make_policy(folder))
    store.wait()
    assert order == ["first written", "second begun"]
    assert steps(tmp_path) == ["step_3"]


def test_a_failure_in_the_background_surfaces_once(tmp_path):
    """A full disk while training goes on: told at the next look, nothing half-written, earlier checkpoints stay."""
    store = CheckpointStore(tmp_path, CheckpointSettings(async_save=True))
    write(store, 1)

    def save(folder: Path):
        def finish():
            raise OSError(28, "No space left on device")

        return finish

    store.write(2, {"step": 2}, save)
    with pytest.raises(UserError, match=r"cannot write the checkpoint of step 2 .*No space left"):
        store.wait()
    store.raise_failure()
    assert steps(tmp_path) == ["step_1"]
    store.write(3, {"step": 3}, save)
    with pytest.raises(UserError, match="step 3"):
        store.write(4, {"step": 4}, make_policy)
    write(store, 4)
    assert store.latest() == tmp_path / "step_4"


def test_one_changed_byte_of_a_large_file_is_found(tmp_path):
    """Files above 16 MiB used to be checked by size alone."""
    store = CheckpointStore(tmp_path, CheckpointSettings())

    def save(folder: Path) -> None:
        make_policy(folder)
        with (folder / "large.bin").open("wb") as file:
            file.truncate(17 * 2**20)

    store.write(1, {"step": 1}, save)
    store.wait()
    read_checkpoint(tmp_path / "step_1")
    with (tmp_path / "step_1/policy/large.bin").open("r+b") as file:
        file.seek(9 * 2**20)
        file.write(b"x")
    with pytest.raises(UserError, match=r"content of policy/large.bin"):
        read_checkpoint(tmp_path / "step_1")


def test_a_digest_given_by_the_writer_is_what_is_checked(tmp_path):
    """Ranks hash what they wrote; a file that changed on its way to the disk does not match."""
    store = CheckpointStore(tmp_path, CheckpointSettings())

    def save(folder: Path):
        make_policy(folder)
        (folder / "part.bin").write_bytes(b"on disk")
        return lambda: {"part.bin": hashlib.sha256(b"in memory").hexdigest()}

    store.write(1, {"step": 1}, save)
    store.wait()
    with pytest.raises(UserError, match=r"content of policy/part.bin"):
        read_checkpoint(tmp_path / "step_1")


def test_damaged_random_state_is_one_clear_error():
    for damage in ({}, {"python": 5}, {**rng_state(), "torch": "AAAA"}, {**rng_state(), "numpy": [1, 2, 3]}):
        with pytest.raises(UserError, match=r"random state cannot be restored .*another checkpoint"):
            restore_rng_state(damage)


def test_seeds_of_ranks_differ_and_repeat():
    draws = []
    for rank in (0, 1, 1):
        seed_all("state", rank)
        draws.append((random.random(), float(np.random.rand()), torch.rand(1).item()))
    assert draws[1] == draws[2] and draws[0] != draws[1]
