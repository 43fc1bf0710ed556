"""Checkpoints of another run are found before anything is loaded."""

from pathlib import Path

import pytest

from nemo_rl_dsv4 import runtime
from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.errors import UserError

RECIPE = Path(__file__).parents[3] / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


def test_a_used_folder_is_refused_before_the_policy_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes of loading went before; and a run that writes no checkpoints was refused as well."""
    (tmp_path / "logs" / "exp_004").mkdir(parents=True)
    (tmp_path / "saved" / "exp_005" / "step_40").mkdir(parents=True)
    overrides = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/saved"]
    monkeypatch.setattr(runtime, "make_tokenizer", lambda config: pytest.fail("the run went on"))
    with pytest.raises(UserError, match=r"saved/exp_005 already holds checkpoints \(step_40\); continue with --resume"):
        runtime.run(load_config(RECIPE, [*overrides, "checkpointing.enabled=true"]))
    runtime.refuse_used_checkpoints(load_config(RECIPE, [*overrides, "checkpointing.enabled=false"]))
    (tmp_path / "saved" / "exp_005" / "step_40").rename(tmp_path / "saved" / "exp_005" / "tmp_step_40")
    runtime.refuse_used_checkpoints(load_config(RECIPE, [*overrides, "checkpointing.enabled=true"]))
