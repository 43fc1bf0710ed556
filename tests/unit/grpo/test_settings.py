from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.config.algorithm import GRPO, ClippedPGLoss
from nemo_rl_dsv4.config.run import Checkpointing
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.settings import (
    CheckpointSettings,
    GRPOSettings,
    LossSettings,
    RewardShapingSettings,
    TrainerSettings,
    read_section,
)

RECIPES = Path(__file__).parents[3] / "examples" / "configs" / "recipes" / "llm"


@pytest.mark.parametrize(
    ("kind", "section"),
    [(GRPOSettings, GRPO()), (LossSettings, ClippedPGLoss()), (CheckpointSettings, Checkpointing())],
)
def test_recipe_sections_have_every_key_the_trainer_reads(kind, section):
    """A key renamed in the recipe schema would otherwise only be missed when a run starts."""
    found = read_section(kind, section, "section")
    assert isinstance(found, kind)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_makes_trainer_settings(recipe):
    """Defaults chain, interpolation and cross-checks of every shipped recipe end in settings the trainer accepts."""
    config = load_config(recipe, ["grpo.max_num_steps=7"])
    found = TrainerSettings.from_config(config)
    assert found.grpo.max_num_steps == 7
    assert found.train_global_batch_size == config.policy.train_global_batch_size
    assert found.loss.ratio_clip_max == config.loss_fn.ratio_clip_max
    assert found.config_yaml is not None and "max_num_steps: 7" in found.config_yaml


def test_values_are_copied_and_nested_sections_read():
    section = GRPO(num_prompts_per_step=3, advantage_clip_low=-1.0)
    found = read_section(GRPOSettings, section, "grpo")
    assert (found.num_prompts_per_step, found.advantage_clip_low) == (3, -1.0)
    assert isinstance(found.reward_shaping, RewardShapingSettings)


def test_missing_key_is_named():
    with pytest.raises(UserError, match="'checkpointing' has no key 'enabled'"):
        read_section(CheckpointSettings, SimpleNamespace(), "checkpointing")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"grpo": replace(GRPOSettings(), skip_reference_policy_logprobs_calculation=True)}, "skip_reference"),
        ({"train_global_batch_size": 500}, "train_global_batch_size is 500"),
        (
            {"train_global_batch_size": 256, "loss": LossSettings(force_on_policy_ratio=True)},
            "force_on_policy_ratio needs one update",
        ),
    ],
)
def test_contradictions_between_sections_are_named(change, key):
    with pytest.raises(UserError, match=key):
        TrainerSettings(**change)


def test_time_limit_in_seconds():
    assert CheckpointSettings(checkpoint_must_save_by="01:02:03:04").seconds_to_save_by == 93784
    assert CheckpointSettings().seconds_to_save_by is None
