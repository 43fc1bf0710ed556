"""`policy.dsv4.refit` reaches both kinds of engines."""

from pathlib import Path

import pytest

from nemo_rl_dsv4 import runtime
from nemo_rl_dsv4.config import load_config
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


@pytest.mark.parametrize("key", ["checks", "on_finding", "transport"])
def test_other_words_are_refused(tiny, key) -> None:
    with pytest.raises(UserError, match=rf"policy.dsv4.refit.{key} .* is 'maybe', wanted one of"):
        load_config(tiny, [f"policy.dsv4.refit.{key}=maybe"])
