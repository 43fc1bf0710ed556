"""What the schema accepts and refuses, and that it, the base file and NeMo-RL's keys agree."""

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from nemo_rl_dsv4.config.inheritance import load_layers, merge_layers
from nemo_rl_dsv4.config.key_names import fields_of, key_paths, nearest, section_of
from nemo_rl_dsv4.config.load import load_config
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.section import DisabledSection
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.settings import ABSENT_WHERE_NULL

NOT_IN_BASE_FILE = {"policy.dsv4.tiny.", "policy.scheduler.", "data.default.", "data_plane.", "on_policy_distillation."}


def sections(root: type[BaseModel]):
    yield root
    for child in fields_of(root).values():
        if child is not None:
            yield from sections(child)


def test_the_base_file_writes_every_key_so_that_overrides_need_no_plus(base_file):
    """All but those that NeMo-RL's schema takes with a value or not at all: the file names them in its header."""
    recipe = OmegaConf.to_container(merge_layers(load_layers(base_file)), resolve=False)

    def paths(node, prefix=""):
        for key, value in node.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from paths(value, f"{prefix}{key}.")

    written = set(paths(recipe)) | set(ABSENT_WHERE_NULL)
    wanted = {p for p in key_paths(MasterConfig) if not any(p.startswith(skip) for skip in NOT_IN_BASE_FILE)}
    assert wanted - written == set()


def test_the_tiny_recipe_writes_every_key_of_the_tiny_model(tiny):
    recipe = OmegaConf.to_container(merge_layers(load_layers(tiny)), resolve=False)
    written = recipe["policy"]["dsv4"]["tiny"]
    section = fields_of(section_of(MasterConfig.model_fields["policy"].annotation))["dsv4"]
    tiny_section = fields_of(section)["tiny"]
    assert set(written) == set(fields_of(tiny_section))
    assert set(written["warm_start"]) == set(fields_of(fields_of(tiny_section)["warm_start"]))


def test_every_field_is_documented():
    missing = [
        f"{section.__name__}.{name}"
        for section in sections(MasterConfig)
        for name, info in section.model_fields.items()
        if not info.description
    ]
    assert missing == []


def test_every_section_refuses_unknown_keys():
    open_sections = {s.__name__ for s in sections(MasterConfig) if s.model_config.get("extra") != "forbid"}
    assert open_sections == {DisabledSection.__name__, "DynamicBatching"}


@pytest.mark.parametrize("recipe", ["tiny", "base_file"])
def test_the_resolved_recipe_loads_to_the_same_configuration(recipe, request, tmp_path):
    config = load_config(request.getfixturevalue(recipe))
    path = tmp_path / "config.yaml"
    path.write_text(config.resolved_yaml(), encoding="utf-8")
    assert load_config(path) == config
    assert "_v2" in config.resolved_yaml() and "${" not in config.resolved_yaml()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "grpo.num_prompts_per_step=many",
            r"grpo.num_prompts_per_step \(in override .*\) is 'many', wanted an integer",
        ),
        ("grpo.num_prompts_per_step=true", "is true, wanted an integer"),
        ("grpo.num_prompts_per_step='16'", "is '16', wanted an integer"),
        ("grpo.num_prompts_per_step=1.5", "is 1.5, wanted an integer"),
        ("grpo.num_prompts_per_step=0", "is 0, wanted at least 1"),
        ("grpo.val_at_start=1", "is 1, wanted true or false"),
        ("policy.generation.top_p=1.5", "is 1.5, wanted at most 1.0"),
        ("policy.dsv4.train_mode=int8", "wanted one of 'bf16', 'qat', 'fp8'"),
        ("policy.dsv4.tiny.compress_ratios=[0,3,4,128,4]", r"compress_ratios.1 .* is 3, wanted one of 0, 4, 128"),
        ("policy.dynamic_batching.enabled=true", "is true, wanted false"),
        ("logger.log_dir=null", "is null, wanted text"),
        ("policy.hf_config_overrides=3", "is 3, wanted a mapping"),
    ],
)
def test_a_wrong_value_names_key_found_and_wanted(tiny, override, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny, [override])


def test_a_wrong_key_in_a_file_names_the_file(write, tiny):
    recipe = write("mine.yaml", f"defaults: {tiny}\npolicy: {{dsv4: {{rollout_profil: bf16}}}}\n")
    with pytest.raises(
        UserError, match=r"policy.dsv4.rollout_profil \(in .*mine.yaml\); did you mean policy.dsv4.rollout_profile"
    ):
        load_config(recipe)


def test_a_missing_section_says_how_to_get_it(write):
    with pytest.raises(UserError, match=r"policy is missing; .* inherit from grpo_dsv4.yaml"):
        load_config(write("empty.yaml", "grpo: {seed: 1}\n"))


def test_one_wrong_value_seen_through_interpolation_is_one_problem(tiny):
    with pytest.raises(UserError) as caught:
        load_config(tiny, ["grpo.seed=x"])
    assert "more wrong" not in str(caught.value)


def test_two_wrong_keys_are_counted(tiny):
    with pytest.raises(UserError, match="and 1 more wrong key"):
        load_config(tiny, ["+grpo.foo=1", "grpo.val_period=x"])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("policy.context_parallel_size", "policy.dtensor_cfg.context_parallel_size"),
        ("loss_fn.ratio_clip", "loss_fn.ratio_clip_c"),
        ("policy.lr", "policy.optimizer.kwargs.lr"),
        ("checkpoint.save_period", "checkpointing.save_period"),
        ("policy.dsv4.fake_quants.kv", "policy.dsv4.fake_quant.kv"),
    ],
)
def test_the_nearest_key_is_the_one_that_was_meant(wrong, right):
    assert nearest(MasterConfig, wrong) == right


def test_keys_that_only_nemo_rl_uses_pass_when_off(write, tiny):
    text = f"""
defaults: {tiny}
policy:
  megatron_cfg: {{enabled: false, optimizer: {{lr: 1.0e-6}}, tensor_model_parallel_size: 2}}
  dynamic_batching: {{enabled: false, train_mb_tokens: "${{mul:${{policy.max_total_sequence_length}}, 2}}"}}
  sequence_packing: {{enabled: false, algorithm: modified_first_fit_decreasing}}
data_plane: {{enabled: false, impl: transfer_queue}}
"""
    config = load_config(write("nemo.yaml", text))
    assert config.policy.dynamic_batching.model_extra == {"train_mb_tokens": 512}
