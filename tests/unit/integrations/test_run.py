"""Run folders, checkpoints and the state of a resumed run; and the switch on the command line."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nemo_rl_dsv4.cli.run_grpo import main
from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import write_manifest
from nemo_rl_dsv4.integrations.nemo_rl import run as module
from nemo_rl_dsv4.integrations.nemo_rl.run import checkpoints_of, latest_checkpoint, open_folder, save_state
from nemo_rl_dsv4.utils.metrics_file import append_step, read_steps

TINY = Path(__file__).parents[3] / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


@dataclass
class SaveState:
    total_steps: int
    current_step: int
    current_epoch: int
    consumed_samples: int
    total_valid_tokens: int
    val_reward: float


@pytest.fixture(autouse=True)
def state_type(monkeypatch):
    monkeypatch.setattr(module, "symbol", {"nemo_rl.algorithms.grpo:GRPOSaveState": SaveState}.__getitem__)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "logs" / "exp_002"
    folder.mkdir(parents=True)
    recorded = {"checkpointing": {"checkpoint_dir": str(tmp_path / "saved")}}
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    return folder


def write_checkpoint(folder, step, loader=True):
    path = folder / f"step_{step}"
    (path / "policy").mkdir(parents=True)
    (path / "policy" / ".metadata").write_text("state")
    (path / "training_info.json").write_text(json.dumps({"total_steps": step, "consumed_samples": 8, "other": 1}))
    if loader:
        (path / "train_dataloader.pt").write_text("loader")
    write_manifest(path, {})
    return path


@pytest.fixture
def config(tmp_path):
    return load_config(
        TINY, [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/other", "runtime=embedded"]
    )


def test_the_newest_checkpoint_of_a_run_is_found_where_the_run_put_it(run_dir, tmp_path, config):
    saved = tmp_path / "saved" / "exp_002"
    write_checkpoint(saved, 9)
    newest = write_checkpoint(saved, 10)
    (saved / "tmp_step_11").mkdir()
    assert latest_checkpoint(run_dir) == newest
    assert checkpoints_of(config, run_dir, run_dir) == saved
    assert checkpoints_of(config, run_dir, None) == tmp_path / "other" / "exp_002"


def test_a_damaged_checkpoint_and_one_of_the_embedded_trainer_are_refused(run_dir, tmp_path):
    saved = tmp_path / "saved" / "exp_002"
    with pytest.raises(UserError, match="holds no checkpoint to resume from"):
        latest_checkpoint(run_dir)
    write_checkpoint(saved, 3, loader=False)
    with pytest.raises(UserError, match="of the embedded trainer .* resume it with --trainer embedded"):
        latest_checkpoint(run_dir)
    (write_checkpoint(saved, 4) / "policy" / ".metadata").unlink()
    with pytest.raises(UserError, match=r"step_4 is damaged: policy/.metadata is missing"):
        latest_checkpoint(run_dir)


def test_a_new_run_does_not_mix_with_old_checkpoints(run_dir, tmp_path, config):
    write_checkpoint(tmp_path / "other" / "exp_002", 1)
    with pytest.raises(UserError, match="already holds checkpoints"):
        checkpoints_of(config, run_dir, None)
    section = config.checkpointing.model_copy(update={"enabled": False})
    checkpoints_of(config.model_copy(update={"checkpointing": section}), run_dir, None)  # writes none


def test_a_resumed_run_drops_the_records_it_will_make_again(run_dir, tmp_path, config):
    for step in range(5):
        append_step(run_dir / "metrics.jsonl", step, {"train/loss": 0.5})
    checkpoint = write_checkpoint(tmp_path / "saved" / "exp_002", 2)
    logger = open_folder(config, checkpoint, run_dir)
    assert logger.run_dir == run_dir
    assert [record["step"] for record in read_steps(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert open_folder(config, None, None).run_dir.name == "exp_003"


def test_the_state_of_a_run_is_that_of_its_checkpoint(tmp_path):
    assert save_state(None) == SaveState(0, 0, 0, 0, 0, -99999999.0)
    assert save_state(write_checkpoint(tmp_path, 6)) == SaveState(6, 0, 0, 8, 0, -99999999.0)


@pytest.mark.parametrize("before", [None, "10.0.0.1:6379"])
def test_the_loop_finds_this_runs_ray_where_there_are_several(monkeypatch, before):
    """With another Ray on the machine, NeMo-RL's memory tracker stopped the first step with a ConnectionError."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if before:
        monkeypatch.setenv("RAY_ADDRESS", before)
    context = SimpleNamespace(gcs_address="127.0.0.1:1234")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    with module.ray_address():
        assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1234"
    assert os.environ.get("RAY_ADDRESS") == before


def test_the_switch_wins_over_the_recipe_and_says_what_is_missing(capsys, tmp_path):
    places = [f"logger.log_dir={tmp_path}", f"checkpointing.checkpoint_dir={tmp_path}", "runtime=embedded"]
    words = ["--config", str(TINY), "--dry-run", f"policy.dsv4.tiny.cache_dir={tmp_path}", *places]
    assert main([*words, "--trainer", "embedded"]) == 0
    capsys.readouterr()
    assert main([*words, "--trainer", "nemo_rl"]) == 2
    assert "NeMo-RL's source tree is not importable; put its checkout on PYTHONPATH" in capsys.readouterr().err
    assert main([*words, "--trainer", "theirs"]) == 2
    assert "choose from" in capsys.readouterr().err
