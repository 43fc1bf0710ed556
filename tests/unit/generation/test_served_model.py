"""The folder that engines serve: its config.json is the trainer's model, and its experts can be refitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.config.vllm_spec import vllm_spec
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.served_model import check_served_model, check_window_yarn

RECIPE = "examples/configs/recipes/llm/grpo-dsv4-mini-1n1g-automodel-qat.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    served = {"swiglu_limit": 10.0, "num_nextn_predict_layers": 1, "expert_dtype": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(served))
    return tmp_path


def test_an_override_that_engines_do_not_get_is_refused(folder: Path) -> None:
    """Cases C076, C078: it reached the trainer alone, and no refit could show it."""
    check_served_model(folder, {"swiglu_limit": 10.0, "num_nextn_predict_layers": 0}, quantized=True)
    for key, value in (("swiglu_limit", 5.0), ("rope_theta", 1000.0)):
        with pytest.raises(UserError, match=rf"hf_config_overrides.{key} is {value}, but .*config.json, which a vLLM"):
            check_served_model(folder, {key: value}, quantized=True)


def test_experts_of_another_format_are_refused_with_the_command_that_converts_them(folder: Path) -> None:
    """Case C032: expert_dtype in the recipe reached the trainer, and the engine started with FP4 experts."""
    (folder / "config.json").write_text(json.dumps({"expert_dtype": "fp4"}))
    with pytest.raises(UserError, match=r"is 'fp4'; wanted fp8, .*: run `nemo-rl-dsv4 convert .* DST --to fp8`, then"):
        check_served_model(folder, {"expert_dtype": "fp8"}, quantized=True)
    check_served_model(folder, {}, quantized=False)


def test_a_recipe_is_held_against_the_folder_before_anything_starts(folder: Path) -> None:
    config = load_config(Path(RECIPE), ["+policy.hf_config_overrides.swiglu_limit=5.0"])
    with pytest.raises(UserError, match="swiglu_limit is 5.0"):
        vllm_spec(config, folder)
    assert vllm_spec(load_config(Path(RECIPE), []), folder).model == str(folder)
    assert vllm_spec(config, folder / "not there yet").window_yarn is None


@pytest.mark.parametrize(
    ("version", "engine"), [("0.26.0", True), ("0.29.1", True), ("0.30.0", False), ("0.33.0", False)]
)
def test_yarn_on_window_layers_is_the_versions(version: str, engine: bool) -> None:
    """Case C076: the profiles say what 0.26 does, and up to 0.33 starts."""
    served = {"rope_scaling": {"type": "yarn", "factor": 16}}
    check_window_yarn(version, engine, served)
    with pytest.raises(UserError, match=f"{version} applies .*; set policy.dsv4.alignment.yarn_on_window_layers to"):
        check_window_yarn(version, not engine, served)
    check_window_yarn(version, not engine, {"rope_scaling": None})
