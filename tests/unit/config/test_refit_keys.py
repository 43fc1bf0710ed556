"""`policy.dsv4.refit` reaches both kinds of engines."""

from pathlib import Path

import pytest

from nemo_rl_dsv4 import runtime
from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config.unused_keys import unused_keys
from nemo_rl_dsv4.config.vllm_spec import vllm_spec
from nemo_rl_dsv4.errors import UserError

CHOSEN = ["policy.dsv4.refit.checks=all", "policy.dsv4.refit.on_finding=warn"]


@pytest.mark.parametrize(("overrides", "wanted"), [([], ("sampled", "stop")), (CHOSEN, ("all", "warn"))])
def test_checks_reach_the_engines(tiny, tmp_path, monkeypatch, overrides, wanted) -> None:
    """Case: settings of an engine that no key of a recipe reached."""
    config = load_config(tiny, overrides)
    monkeypatch.setattr(runtime, "read_config", lambda folder, own: {})
    for spec in (vllm_spec(config, Path(tmp_path)), runtime.reference_spec(config, Path(tmp_path))):
        assert (spec.refit_checks, spec.refit_on_finding) == wanted


def test_direct_writes_are_asked_for_and_not_of_engines_that_sleep(tiny, tmp_path) -> None:
    off = load_config(tiny, ["policy.dsv4.refit.direct=false"])
    assert vllm_spec(off, Path(tmp_path)).refit_direct is False and not any("direct" in s for s in unused_keys(off))
    config = load_config(tiny, ["policy.dsv4.refit.direct=true"])
    assert vllm_spec(config, Path(tmp_path)).refit_direct is True
    assert any("policy.dsv4.refit.direct (true)" in sentence.lower() for sentence in unused_keys(config))
    mini = tiny.parent / "grpo-dsv4-mini-1n1g-automodel-qat.yaml"
    chosen = ["policy.dsv4.refit.direct=true", "policy.dsv4.engine_sleep=true"]
    with pytest.raises(UserError, match="policy.dsv4.refit.direct is true and policy.dsv4.engine_sleep too"):
        validate(load_config(mini, chosen), runs_here=False)
    validate(load_config(mini, chosen[:1]), runs_here=False)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], True),
        (["policy.dsv4.engine_sleep=true"], False),
        (["policy.generation.vllm_cfg.tensor_parallel_size=2", "cluster.gpus_per_node=2"], False),
        (["policy.dsv4.gpu=null", "policy.dsv4.rollout_profile=vllm-hopper"], True),
        (["policy.dsv4.gpu=b200"], False),
        (["policy.dsv4.gpu=mi300x"], False),
    ],
)
def test_without_a_choice_direct_writes_are_made_where_they_were_run(tiny, tmp_path, overrides, wanted) -> None:
    config = load_config(tiny.parent / "grpo-dsv4-mini-1n1g-automodel-qat.yaml", overrides)
    validate(config, runs_here=False)
    assert vllm_spec(config, Path(tmp_path)).refit_direct is wanted


@pytest.mark.parametrize("key", ["checks", "on_finding", "transport"])
def test_other_words_are_refused(tiny, key) -> None:
    with pytest.raises(UserError, match=rf"policy.dsv4.refit.{key} .* is 'maybe', wanted one of"):
        load_config(tiny, [f"policy.dsv4.refit.{key}=maybe"])
