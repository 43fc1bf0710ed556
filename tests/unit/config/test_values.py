"""Values that the schema lets through and no run can use, and keys that do nothing."""

import pytest

from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config.rules_of_values import check_stored_formats
from nemo_rl_dsv4.config.unused_keys import unknown_overrides, unused_keys
from nemo_rl_dsv4.errors import UserError

EXPERT_WIDTH = "policy.dsv4.tiny.moe_intermediate_size"


@pytest.fixture
def recipe(tiny, tmp_path):
    places = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/ckpt", "runtime=embedded"]
    return lambda *overrides: load_config(tiny, [*places, *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.seed=5000000000", r"grpo.seed is 5000000000; wanted at most 4294967295"),
        ("data.train.seed=4294967296", r"data.train.seed is 4294967296"),
        ("data.num_workers=5000", r"data.num_workers is 5000; this machine has \d+ cores, wanted at most \d+"),
        ("env.math.num_workers=5000", r"env.math.num_workers is 5000"),
        ("policy.generation.reference_cfg.num_workers=5000", r"reference_cfg.num_workers is 5000"),
        ("policy.generation.stop_strings=['']", r"stop_strings holds '', at which every response ends at once"),
        (f"{EXPERT_WIDTH}=200", rf"{EXPERT_WIDTH} is 200; wanted a multiple of 32"),
        ("checkpointing.metric_name=val:acuracy", r"'val:acuracy', which no step reports; did you mean accuracy\?"),
        ("checkpointing.metric_name=train:rewards", r"did you mean reward\?"),
        ("checkpointing.metric_name=val:pass_k", r"'val:pass_k', which no step reports"),
    ],
)
def test_absurd_values_are_named_at_the_start(recipe, override, message):
    with pytest.raises(UserError, match=message):
        validate(recipe(override))


def test_a_stopping_metric_is_checked_at_the_start(recipe):
    """A misspelt name was found after the first validation, minutes into a run."""
    stop = ("grpo.stop_at_validation_metric=accurracy", "grpo.stop_at_validation_threshold=0.5")
    with pytest.raises(UserError, match=r"stop_at_validation_metric is 'accurracy'.*did you mean accuracy"):
        validate(recipe(*stop))
    validate(recipe("grpo.stop_at_validation_metric=accuracy", stop[1]))
    several = ("grpo.val_num_generations_per_prompt=2", "checkpointing.metric_name=val:pass_k")
    validate(recipe(*several))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_dtype": "fp3"}, r"config.json: expert_dtype is 'fp3'; wanted fp4 or fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method is 'awq'; wanted fp8"),
        ({"quantization_config": "fp8"}, r"quantization_config is str; wanted a mapping"),
    ],
)
def test_formats_that_cannot_be_read_are_named(values, message):
    with pytest.raises(UserError, match=message):
        check_stored_formats(values, "config.json")
    check_stored_formats({"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}, "config.json")


def test_keys_without_effect_are_named_in_one_line(recipe):
    assert unused_keys(recipe()) == []
    (line,) = unused_keys(
        recipe(
            "checkpointing.save_optimizer=false",
            "logger.num_val_samples_to_print=3",
            "++data.train.env_name=code",
            "++data.train.processor=math_hf_data_processor",
        )
    )
    assert "checkpointing.save_optimizer (False)" in line and "logger.num_val_samples_to_print (3)" in line
    assert "data.train.env_name (code)" in line and "processor" not in line


@pytest.mark.parametrize(
    "override",
    [
        "grpo.async_grpo.max_generation_failures=2",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=8",
        "policy.dsv4.vllm_python=python",
        "+policy.generation.vllm_kwargs.max_num_seqs=3",
    ],
)
def test_a_key_that_the_reference_engine_or_the_loop_does_not_read_is_named(recipe, override):
    key = override.lstrip("+").partition("=")[0].removesuffix(".max_num_seqs")
    (line,) = unused_keys(recipe(override))
    assert f"{key} (" in line


def test_overrides_of_the_model_that_nothing_reads_are_noticed(recipe):
    (line,) = unknown_overrides(recipe("+policy.hf_config_overrides={num_hash_layer:1,expert_dtype:fp8}"))
    assert line.startswith("policy.hf_config_overrides.num_hash_layer is no key") and "num_hash_layers?" in line
