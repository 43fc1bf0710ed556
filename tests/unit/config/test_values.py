"""Values that the schema lets through and no run can use, and keys that do nothing."""

import ast
import typing
from pathlib import Path

import pytest

import nemo_rl_dsv4
from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config import unused_keys as tables
from nemo_rl_dsv4.config.key_names import section_of
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.prompts import make_tokenizer
from nemo_rl_dsv4.config.rules_of_values import check_stored_formats
from nemo_rl_dsv4.config.section import DisabledSection
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
        (
            "policy.generation.port_range_low=5000",
            r"port_range_low is 5000, above policy.generation.port_range_high = 4999",
        ),
        (f"{EXPERT_WIDTH}=200", rf"{EXPERT_WIDTH} is 200; wanted a multiple of 32"),
        ("checkpointing.metric_name=val:acuracy", r"'val:acuracy', which no step reports; did you mean accuracy\?"),
        ("checkpointing.metric_name=train:rewards", r"did you mean reward\?"),
        ("checkpointing.metric_name=val:pass_k", r"'val:pass_k', which no step reports"),
    ],
)
def test_absurd_values_are_named_at_the_start(recipe, override, message):
    with pytest.raises(UserError, match=message):
        validate(recipe(override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.generation.temperature=inf", "policy.generation.temperature .* is inf, wanted a finite number"),
        ("policy.generation.val_temperature=inf", "val_temperature .* is inf, wanted a finite number"),
        ("loss_fn.ratio_clip_min=nan", "ratio_clip_min .* is nan, wanted a finite number"),
        ("policy.generation.vllm_cfg.refit_buffer_size_gb=inf", "refit_buffer_size_gb .* is inf, wanted a finite"),
        ("policy.generation.vllm_cfg.refit_buffer_size_gb=1e9", "is 1000000000.0, wanted at most 64"),
        ("policy.dsv4.refit.folder=''", "policy.dsv4.refit.folder .* is '', wanted text that is not empty"),
        ("policy.dsv4.vllm_python=''", "policy.dsv4.vllm_python .* is '', wanted text that is not empty"),
        ("logger.log_dir=''", "logger.log_dir .* is '', wanted text that is not empty"),
    ],
)
def test_infinite_numbers_and_empty_names_are_refused(recipe, override, message):
    with pytest.raises(UserError, match=message):
        recipe(override)


def test_a_stop_token_that_the_tokenizer_does_not_have_is_refused(recipe):
    """A dry run makes the tokenizer too."""
    last = make_tokenizer(recipe()).vocab_size - 1
    make_tokenizer(recipe(f"policy.generation.stop_token_ids=[{last}]"))
    with pytest.raises(UserError, match=rf"stop_token_ids holds {last + 1}, .*: tokenizer tiny has {last + 1} tokens"):
        make_tokenizer(recipe(f"policy.generation.stop_token_ids=[{last + 1}]"))


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


def keys_with_a_choice(section, prefix=""):
    """(dotted key, name) of every value of the schema that a recipe can choose; what admits one value is left out."""
    for name, info in section.model_fields.items():
        child, path = section_of(info.annotation), prefix + (info.alias or name)
        if child is not None and issubclass(child, DisabledSection):
            continue
        if child is not None:
            yield from keys_with_a_choice(child, f"{path}.")
        elif info.annotation is not type(None) and not (
            typing.get_origin(info.annotation) is typing.Literal and len(typing.get_args(info.annotation)) == 1
        ):
            yield path, name


def test_every_key_is_read_somewhere_or_named_as_unused():
    """Keys that no line of the package reads were accepted without a word (`enable_vllm_metrics_logger`)."""
    read = set()
    for file in Path(nemo_rl_dsv4.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    named = {key for name, table in vars(tables).items() if name.startswith("UNUSED") for key in table}
    silent = {path for path, name in keys_with_a_choice(MasterConfig) if name not in read and path not in named}
    assert not silent


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger=true",
        "policy.generation.vllm_cfg.vllm_metrics_logger_interval=3.0",
        "policy.generation.vllm_cfg.use_tqdm=false",
        "+policy.generation.refit_cfg.a=1",
        "+policy.generation.mcore_generation_config.a=1",
        "policy.generation.real_quant_export_cpu_offload=false",
        "policy.generation.port_range_low=4000",
        "policy.generation.port_range_high=4500",
        "policy.dtensor_cfg.defer_fsdp_grad_sync=false",
        "policy.dtensor_cfg.automodel_kwargs.backend.enable_fsdp_optimizations=true",
        "+logger.tensorboard.a=1",
    ],
)
def test_a_key_that_vllm_engines_do_not_read_is_named(tiny, override):
    mini = tiny.parent / "grpo-dsv4-mini-1n1g-automodel-qat.yaml"
    key = override.lstrip("+").partition("=")[0].removesuffix(".a")
    (line,) = unused_keys(load_config(mini, [override]))
    assert f"{key} (" in line
    assert unused_keys(load_config(mini)) == []
