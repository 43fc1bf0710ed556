"""Hydra's grammar in struct mode, on the real recipe."""

from pathlib import Path

import pytest

from nemo_rl_dsv4.config.load import load_config
from nemo_rl_dsv4.errors import UserError

RECIPE = Path(__file__).parents[3] / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


@pytest.fixture(scope="module")
def unchanged():
    return load_config(RECIPE)


@pytest.mark.parametrize(
    ("override", "read", "wanted"),
    [
        ("grpo.seed=7", lambda c: c.grpo.seed, 7),
        ("policy.optimizer.kwargs.lr=3e-5", lambda c: c.policy.optimizer.kwargs["lr"], 3e-5),
        ("policy.optimizer.kwargs.betas=[0.8,0.9]", lambda c: c.policy.optimizer.kwargs["betas"], [0.8, 0.9]),
        ("policy.scheduler=null", lambda c: c.policy.scheduler, None),
        ("policy.dtensor_cfg._v2=false", lambda c: c.policy.dtensor_cfg.v2, False),
        ("policy.dsv4.tiny.warm_start={steps:3}", lambda c: c.policy.dsv4.tiny.warm_start.steps, 3),
        (
            "+policy.hf_config_overrides.num_hidden_layers=3",
            lambda c: c.policy.hf_config_overrides,
            {"num_hidden_layers": 3},
        ),
        ("policy.scheduler.0.kwargs.total_iters=9", lambda c: c.policy.scheduler[0].kwargs["total_iters"], 9),
        ("++grpo.seed=8", lambda c: c.grpo.seed, 8),
        ("~policy.scheduler", lambda c: c.policy.scheduler, None),
        ("policy.generation.stop_strings=['a b','c']", lambda c: c.policy.generation.stop_strings, ["a b", "c"]),
    ],
)
def test_an_override_changes_what_it_names(tiny, unchanged, override, read, wanted):
    assert read(load_config(tiny, [override])) == wanted
    assert read(unchanged) != wanted


def test_a_mapping_override_merges(tiny):
    before = load_config(tiny).policy.dsv4.tiny
    changed = load_config(tiny, ["policy.dsv4.tiny.warm_start={steps:3}"]).policy.dsv4.tiny
    assert before is not None and changed is not None
    assert changed.warm_start.steps == 3 and changed.warm_start.batch_size == before.warm_start.batch_size


def test_the_last_override_wins(tiny):
    assert load_config(tiny, ["grpo.seed=1", "grpo.seed=2"]).grpo.seed == 2


def test_interpolated_keys_follow_an_override(tiny):
    assert load_config(tiny, ["policy.generation.temperature=0.5"]).policy.generation.val_temperature == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.sed=1", r"unknown key grpo.sed; did you mean grpo.seed\?"),
        ("policy.train_mode=qat", r"did you mean policy.dsv4.train_mode\?"),
        ("polcy.model_name=tiny", r"did you mean policy.model_name\?"),
        ("+grpo.foo=1", r"unknown key grpo.foo"),
        ("+grpo.seed=1", r"already in the recipe; drop the \+"),
        ("~grpo.sed", r"no key grpo.sed to remove; did you mean grpo.seed\?"),
        ("grpo.seed", "is not an override"),
        ("=3", "'=3' names no key; write key=value"),
        ("grpo.seed=[1", "is not an override"),
        ("grpo.seed=1,2", "sweep"),
        ("grpo.seed.x=1", "unknown key grpo.seed.x; .*grpo_dsv4.yaml lists every key"),
        (
            "+policy.generation.vllm_cfg.bogus=1",
            r"unknown key .*vllm_cfg.bogus \(in .*\); .*grpo_dsv4.yaml lists every key",
        ),
        ("bogus.x=1", "unknown key bogus.x; .*grpo_dsv4.yaml lists every key"),
        ("policy.generation.vllm_kwarg.a=1", r"did you mean policy.generation.vllm_kwargs.a\?"),
        (
            "policy.generation.vllm_cfg.env_vars={A: 'x'}",
            r"does not set policy.generation.vllm_cfg.env_vars.A; write \+policy.generation.vllm_cfg.env_vars={A: 'x'}",
        ),
        ("grpo={sed: 1}", r"unknown key grpo.sed; did you mean grpo.seed\?"),
        (
            "policy.generation.vllm_cfg.env_vars=[]",
            r"env_vars is \[\], wanted a mapping; write .*env_vars.NAME=VALUE",
        ),
        ("++policy.generation.vllm_cfg.env_vars=[]", r"env_vars is \[\], wanted a mapping"),
        ("grpo=[]", r"grpo is \[\], wanted a mapping; write grpo.\w+=VALUE for"),
        ("grpo=3", "grpo is 3, wanted a mapping"),
        ("policy.scheduler={a: 1}", "policy.scheduler .* is {'a': 1}, wanted a list"),
    ],
)
def test_a_bad_override_says_what_to_write(tiny, override, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny, [override])


def test_a_key_that_the_recipe_lacks_needs_a_plus(write):
    recipe = write("r.yaml", "policy: {model_name: a/b}\ndata: {}\n")
    with pytest.raises(UserError, match=r"does not set grpo.seed; write \+grpo.seed=1"):
        load_config(recipe, ["grpo.seed=1"])


def test_a_mapping_that_is_added_keeps_what_is_there(tiny):
    more = load_config(
        tiny, ["+policy.generation.vllm_cfg.env_vars={A: b}", "+policy.generation.vllm_cfg.env_vars.C=d"]
    )
    assert more.policy.generation.vllm_cfg.env_vars == {"A": "b", "C": "d"}
    assert load_config(tiny, ["data.validation=null"]).data.validation is None
