"""The fake-quantization flags of the development branch."""

import pytest

from nemo_rl_dsv4.config.load import load_config
from nemo_rl_dsv4.config.old_branch_flags import OLD_TO_NEW
from nemo_rl_dsv4.errors import UserError

PREFIX = "+policy.hf_config_overrides.fp8_ds_mla_fake_quant_"


@pytest.mark.parametrize(("old", "new"), OLD_TO_NEW.items())
@pytest.mark.parametrize("value", [True, False])
def test_an_old_flag_becomes_the_new_key_and_is_reported(tiny, old, new, value):
    config = load_config(tiny, [f"{PREFIX}{old}={str(value).lower()}"])
    assert getattr(config.policy.dsv4.fake_quant, new) is value
    assert config.policy.hf_config_overrides == {}
    assert len(config.notices) == 1 and f"policy.dsv4.fake_quant.{new}" in config.notices[0]


def test_other_overrides_of_the_model_stay(tiny):
    config = load_config(tiny, [f"{PREFIX}kv=true", "+policy.hf_config_overrides.expert_dtype=fp8"])
    assert config.policy.hf_config_overrides == {"expert_dtype": "fp8"}


def test_an_unknown_flag_of_the_family_lists_the_known_ones(tiny):
    with pytest.raises(UserError, match="fp8_ds_mla_fake_quant_router; .*fp8_ds_mla_fake_quant_moe"):
        load_config(tiny, [f"{PREFIX}router=true"])


def test_a_contradiction_is_refused_and_agreement_is_not(tiny):
    flags = [f"{PREFIX}kv=true", "policy.dsv4.fake_quant.kv=false"]
    with pytest.raises(UserError, match="keep the second one only"):
        load_config(tiny, flags)
    assert load_config(tiny, [flags[0], "policy.dsv4.fake_quant.kv=true"]).policy.dsv4.fake_quant.kv is True


def test_a_flag_that_is_no_bool_is_refused(tiny):
    with pytest.raises(UserError, match="wanted true or false"):
        load_config(tiny, [f"{PREFIX}kv=2"])


def test_no_notice_without_old_flags(tiny):
    assert load_config(tiny).notices == ()
