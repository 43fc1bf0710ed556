"""Weights & Biases and MLflow get the same numbers; both are replaced by recorders here."""

import sys
import types

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.utils.run_logger import RunLogger


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(name):
        return lambda *args, **kwargs: made.append((name, args, kwargs))

    wandb = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=record("wandb.log"), finish=record("wandb.finish"))
    wandb.init = lambda **kwargs: made.append(("wandb.init", (), kwargs)) or run  # type: ignore[attr-defined]
    mlflow = types.ModuleType("mlflow")
    for name in ("set_tracking_uri", "set_experiment", "start_run", "log_metrics", "end_run"):
        setattr(mlflow, name, record(f"mlflow.{name}"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return made


def test_trackers_that_the_recipe_turns_on_get_every_finite_number(tmp_path, calls, request):
    recipe = request.config.rootpath / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"
    on = ["logger.tensorboard_enabled=false", "logger.wandb_enabled=true", "logger.mlflow_enabled=true"]
    settings = load_config(recipe, [*on, "logger.mlflow.tracking_uri=here"]).logger.model_dump()
    logger = RunLogger(tmp_path / "tiny", "", settings)
    logger.log_step(1, {"train/reward": 0.5, "train/broken": float("nan")})
    logger.close()
    names = [name for name, _, _ in calls]
    assert names == [
        "wandb.init",
        "mlflow.set_tracking_uri",
        "mlflow.set_experiment",
        "mlflow.start_run",
        "wandb.log",
        "mlflow.log_metrics",
        "wandb.finish",
        "mlflow.end_run",
    ]
    assert calls[0][2]["id"] == "tiny-exp_001" and calls[0][2]["resume"] == "allow"
    assert calls[4][1:] == (({"train/reward": 0.5},), {"step": 1})
    assert calls[5][1:] == (({"train/reward": 0.5},), {"step": 1})


def test_nothing_but_tensorboard_by_default(tmp_path, calls):
    RunLogger(tmp_path, "").close()
    assert calls == [] and (tmp_path / "exp_001" / "tensorboard").is_dir()
