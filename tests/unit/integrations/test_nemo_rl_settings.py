"""The recipe as NeMo-RL's configuration: its own keys and values, but for the few that are listed."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.settings import (
    ABSENT_WHERE_NULL,
    master_config,
    upstream_settings,
    without_nulls,
)

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
TINY = CONFIGS / "recipes" / "llm" / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


def settings(*overrides, samples=512):
    config = load_config(TINY, list(overrides))
    return config, upstream_settings(config, log_dir="run", checkpoint_dir="saved", val_samples=samples)


def flat(node, prefix=""):
    for key, value in node.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]


def test_nothing_else_changes():
    config, values = settings()
    before = dict(flat(config.model_dump(mode="json", by_alias=True)))
    after = dict(flat(values))
    changed = {key for key in before.keys() | after.keys() if before.get(key, "-") != after.get(key, "-")}
    assert changed - set(ABSENT_WHERE_NULL) == {
        "cluster.gpus_per_node",
        "grpo.skip_reference_policy_logprobs_calculation",
        "policy.router_replay.enabled",
        "logger.log_dir",
        "checkpointing.checkpoint_dir",
    }
    assert after["cluster.gpus_per_node"] == 2 and after["policy.router_replay.enabled"] is False
    assert after["logger.log_dir"] == "run" and after["checkpointing.checkpoint_dir"] == "saved"
    assert after["policy.dtensor_cfg._v2"] is True


def test_what_depends_on_the_recipe():
    _, values = settings("loss_fn.reference_policy_kl_penalty=0.1", "policy.dsv4.router_replay=true")
    assert values["grpo"]["skip_reference_policy_logprobs_calculation"] is False
    assert values["policy"]["router_replay"] == {"enabled": True}


@pytest.mark.parametrize(
    ("overrides", "samples", "wanted"),
    [
        (["grpo.max_val_samples=null", "grpo.val_batch_size=null"], 30, (30, 30)),
        (["grpo.max_val_samples=64", "grpo.val_batch_size=16"], 512, (64, 16)),
        (["grpo.max_val_samples=64", "grpo.val_batch_size=512"], 16, (16, 16)),
        (["grpo.max_val_samples=null"], 0, (0, 1)),  # no validation set
    ],
)
def test_validation_sizes_are_numbers(overrides, samples, wanted):
    _, values = settings(*overrides, samples=samples)
    assert (values["grpo"]["max_val_samples"], values["grpo"]["val_batch_size"]) == wanted


def test_nulls_that_nemo_rl_refuses_are_left_out_and_values_stay():
    values = {"policy": {"generation_batch_size": None, "other": None}, "logger": {"wandb": {"entity": "team"}}}
    assert without_nulls(values) == {"policy": {"other": None}, "logger": {"wandb": {"entity": "team"}}}


def test_a_key_that_nemo_rl_refuses_is_named():
    class Master(BaseModel):
        grpo: dict[str, int]

    assert master_config(Master, {"grpo": {"seed": 1}}).grpo == {"seed": 1}
    with pytest.raises(UserError, match="NeMo-RL's MasterConfig refuses grpo.seed = 'one': Input should be"):
        master_config(Master, {"grpo": {"seed": "one"}})
