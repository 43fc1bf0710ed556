"""The recipes that ship."""

import socket
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl_dsv4.cli.run_grpo import main
from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config.inheritance import load_layers, merge_layers
from nemo_rl_dsv4.config.topology import batch_flow, mesh_axes, ranks, sequence_multiple
from nemo_rl_dsv4.config.unused_keys import unused_keys
from nemo_rl_dsv4.planning.model_config import planned_config

RECIPES = Path(__file__).parents[3] / "examples" / "configs" / "recipes" / "llm"


def leaves(node, prefix=""):
    if isinstance(node, dict):
        return {k: v for key, value in node.items() for k, v in leaves(value, f"{prefix}.{key}".lstrip(".")).items()}
    return {prefix: node}


def difference(left: str, right: str) -> dict:
    a, b = (
        leaves(load_config(RECIPES / f"grpo-dsv4-tiny-1n0g-automodel-{name}.yaml").model_dump())
        for name in (left, right)
    )
    return {key: (a.get(key), b.get(key)) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


EVERY = pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)


@EVERY
def test_a_recipe_is_valid(recipe):
    config = load_config(recipe, ["runtime=embedded"])
    assert validate(config, runs_here=False) == "embedded"
    assert unused_keys(config) == [] or set(unused_keys(config)[0].split(": ")[1].split(", ")) == {
        "cluster.segment_size (16)"
    }


@EVERY
def test_a_recipe_says_what_it_is_on_what_and_how_far_it_was_verified(recipe):
    """Header: a description, then Hardware, Expected KL and Status, each with something to say."""
    header = "".join(line[1:] for line in recipe.read_text().splitlines() if line.startswith("#"))
    parts = [header.find(word) for word in ("Hardware:", "Expected KL:", "Status:")]
    assert parts == sorted(parts) and parts[0] > 20, header
    status = header[parts[2] :].lower()
    assert "verified" in status or "in tests" in status


@EVERY
def test_a_recipe_holds_differences_only(recipe):
    """No key repeats what its parents say."""
    layers = load_layers(recipe)
    parents, own = merge_layers(layers[:-1]), layers[-1][1]
    inherited = leaves(OmegaConf.to_container(parents, resolve=False))
    repeated = {
        key: value
        for key, value in leaves(OmegaConf.to_container(own, resolve=False)).items()
        if key in inherited and inherited[key] == value and "_override_" not in str(own)
    }
    assert not repeated


@EVERY
def test_a_recipe_runs_dry_without_network(recipe, capsys, tmp_path, monkeypatch):
    """Hub ids are named and not looked for; what was not checked is said."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a dry run opened a connection"))
    places = [f"logger.log_dir={tmp_path}/l", f"checkpointing.checkpoint_dir={tmp_path}/c", "runtime=embedded"]
    assert main(["--config", str(recipe), "--dry-run", *places]) == 0
    shown = capsys.readouterr().out
    assert "The recipe is valid. Nothing was started or written." in shown
    large = "deepseek-v4-flash" in recipe.stem
    assert ("were not checked" in " ".join(shown.split())) == large
    assert ("It cannot run here" in shown) == ("1n0g" not in recipe.stem)
    assert not list(tmp_path.iterdir())


FLASH_BASE = ["policy.model_name=deepseek-ai/DeepSeek-V4-Flash-Base"]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*flash-0731*.yaml")), ids=lambda path: path.stem)
def test_flash_base_by_the_two_documented_overrides(recipe):
    """They change the model and nothing else, on every recipe; the tokenizer follows the model where it is not set."""
    overrides = [*FLASH_BASE, "policy.tokenizer.name=deepseek-ai/DeepSeek-V4-Flash-Base"]
    config = load_config(recipe, [*overrides, "runtime=embedded"])
    validate(config, runs_here=False)
    before = leaves(load_config(recipe, ["runtime=embedded"]).model_dump())
    after = leaves(config.model_dump())
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"policy.model_name", "policy.tokenizer.name"}
    assert load_config(recipe, FLASH_BASE).model_dump() == load_config(recipe, overrides).model_dump()
    planned = planned_config(config)
    assert (planned["expert_dtype"], planned["num_nextn_predict_layers"]) == ("fp8", 0)


def test_bf16_and_qat_differ_in_the_train_mode_and_in_where_they_write():
    changed = difference("bf16", "qat")
    assert changed.pop("policy.dsv4.train_mode") == ("bf16", "qat")
    assert set(changed) == {"logger.log_dir", "checkpointing.checkpoint_dir"}


def test_fp8_and_qat_differ_in_the_train_mode_and_in_where_they_write():
    changed = difference("qat", "fp8")
    assert changed.pop("policy.dsv4.train_mode") == ("qat", "fp8")
    assert set(changed) == {"logger.log_dir", "checkpointing.checkpoint_dir"}


def test_cp2ep2_differs_from_qat_in_the_layout_and_in_where_it_writes():
    changed = difference("qat", "cp2ep2-qat")
    assert changed.pop("policy.dtensor_cfg.context_parallel_size") == (1, 2)
    assert changed.pop("policy.dtensor_cfg.expert_parallel_size") == (1, 2)
    assert changed.pop("policy.dtensor_cfg.dp_replicate_size") == (2, 1)
    shorter = {"grpo.max_num_steps", "grpo.val_period", "grpo.max_val_samples", "grpo.val_batch_size"}
    places = {"logger.log_dir", "checkpointing.checkpoint_dir"}
    assert set(changed) <= {"policy.dsv4.cpu_processes"} | places | shorter


def test_two_gpus_differ_from_one_in_the_layout_and_in_where_they_write():
    one, two = (leaves(load_config(RECIPES / f"grpo-dsv4-mini-1n{n}g-automodel-qat.yaml").model_dump()) for n in (1, 2))
    changed = {key: (one.get(key), two.get(key)) for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
    assert changed.pop("cluster.gpus_per_node") == (1, 2)
    assert changed.pop("policy.dtensor_cfg.expert_parallel_size") == (1, 2)
    assert changed.pop("policy.generation.vllm_cfg.tensor_parallel_size") == (1, 2)
    assert set(changed) == {"logger.log_dir", "checkpointing.checkpoint_dir"}
    for tensor_parallel in (1, 2):
        override = [f"policy.generation.vllm_cfg.tensor_parallel_size={tensor_parallel}"]
        config = load_config(RECIPES / "grpo-dsv4-mini-1n2g-automodel-qat.yaml", override)
        assert validate(config, runs_here=False) == "embedded"
        assert mesh_axes(config) == {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep_shard": 1, "ep": 2}


REFERENCE = "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128"


def test_the_reference_recipe_states_the_reference_settings():
    """The facts of NeMo-RL's recipe of the same name."""
    config = load_config(RECIPES / f"{REFERENCE}.yaml")
    policy, grpo, loss = config.policy, config.grpo, config.loss_fn
    layout, engine = policy.dtensor_cfg, policy.generation.vllm_cfg
    backend = layout.automodel_kwargs.backend
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, policy.train_global_batch_size) == (32, 16, 512)
    assert (policy.max_total_sequence_length, config.data.max_input_seq_length) == (3072, 1024)
    assert (policy.generation.max_new_tokens, policy.logprob_chunk_size) == (2048, 1024)
    assert (policy.train_micro_batch_size, policy.logprob_batch_size) == (1, 1)
    assert policy.make_sequence_length_divisible_by == 64
    assert mesh_axes(config) == {"dp_replicate": 1, "dp_shard": 16, "cp": 8, "tp": 1, "ep_shard": 1, "ep": 128}
    assert layout.activation_checkpointing and policy.precision == "bfloat16"
    chosen = (backend.attn, backend.linear, backend.rms_norm, backend.experts, backend.dispatcher)
    assert chosen == ("tilelang", "torch", "torch_fp32", "torch_mm", "deepep")
    adam = policy.optimizer.kwargs
    assert (adam["lr"], adam["weight_decay"], adam["betas"]) == (1e-6, 0.1, [0.9, 0.95])
    assert grpo.use_dynamic_sampling and grpo.batch_multiplier == 4 and not grpo.normalize_rewards
    assert (grpo.reward_scaling.target_min, grpo.reward_scaling.target_max) == (-1.0, 1.0)
    assert grpo.reward_shaping.enabled and grpo.reward_shaping.overlong_buffer_length == 1024
    assert (loss.ratio_clip_max, loss.ratio_clip_c, loss.reference_policy_kl_penalty) == (0.28, 10.0, 0.0)
    assert loss.truncated_importance_sampling_ratio == 2.0 and not loss.token_level_loss
    assert policy.hf_config_overrides == {"num_nextn_predict_layers": 0, "expert_dtype": "fp8"}
    assert (engine.tensor_parallel_size, engine.expert_parallel_size, engine.precision) == (8, 1, "fp8")
    assert (engine.kv_cache_dtype, engine.gpu_memory_utilization, engine.refit_buffer_size_gb) == ("fp8_ds_mla", 0.6, 1)
    assert engine.use_deep_gemm and engine.pow2_weight_scaling_factors and engine.enforce_eager
    assert config.env.math.math_verify_impl == "dapo_math_verify"
    assert engine.env_vars == {"VLLM_USE_DEEP_GEMM_E8M0": "1"}
    assert policy.generation.vllm_kwargs["attention_backend"] == "FLASHMLA_SPARSE_DSV4"
    assert config.logger.wandb_enabled and policy.dsv4.gpu == "h100"


def changes(left: str, right: str) -> dict:
    """What `right` has instead, without names and places of output."""
    a, b = (leaves(load_config(RECIPES / f"{name}.yaml").model_dump()) for name in (left, right))
    names = ("logger.log_dir", "logger.wandb.name", "checkpointing.checkpoint_dir")
    return {key: b.get(key) for key in a.keys() | b.keys() if a.get(key) != b.get(key) and key not in names}


FLASH_0731 = "grpo-deepseek-v4-flash-0731"


def test_the_other_layouts_state_their_published_settings():
    base = changes(f"{REFERENCE}-qat", "grpo-deepseek-v4-flash-base-8n8g-automodel-cp8ep64-10k-qat")
    assert base["policy.model_name"] == base["policy.tokenizer.name"] == "deepseek-ai/DeepSeek-V4-Flash-Base"
    assert (base["cluster.num_nodes"], base["policy.dtensor_cfg.expert_parallel_size"]) == (8, 64)
    assert (base["policy.max_total_sequence_length"], base["policy.generation.max_new_tokens"]) == (10240, 8192)
    h200 = f"{FLASH_0731}-8n8g-h200-automodel-cp8ep64"
    assert changes(f"{REFERENCE}-qat", f"{h200}-qat") == {
        "policy.dsv4.gpu": "h200",
        "policy.dtensor_cfg.expert_parallel_size": 64,
        "cluster.num_nodes": 8,
    }
    assert changes(f"{h200}-qat", f"{h200}-fp8") == {"policy.dsv4.train_mode": "fp8"}


def test_the_mi355x_profile_states_its_published_settings():
    """300 steps, seed 42, AIME every 10 steps with top-p 0.7, TIS 2; BF16 mode rolls out in BF16 with an FP8 cache."""
    mi355x = f"{FLASH_0731}-4n8g-mi355x-automodel"
    config = load_config(RECIPES / f"{mi355x}-qat.yaml")
    grpo, generation = config.grpo, config.policy.generation
    assert (grpo.max_num_steps, grpo.seed, grpo.val_period, grpo.val_num_generations_per_prompt) == (300, 42, 10, 1)
    assert (generation.val_temperature, generation.val_top_p, generation.temperature) == (1.0, 0.7, 1.0)
    assert config.loss_fn.truncated_importance_sampling_ratio == 2.0
    assert (config.cluster.num_nodes, config.world_size) == (4, 32)
    assert not generation.vllm_cfg.use_deep_gemm and "attention_backend" not in generation.vllm_kwargs
    assert config.policy.dtensor_cfg.automodel_kwargs.backend.dispatcher == "uccl_ep"
    assert changes(f"{mi355x}-qat", f"{mi355x}-fp8") == {"policy.dsv4.train_mode": "fp8"}
    bf16 = changes(f"{mi355x}-qat", f"{mi355x}-bf16")
    assert bf16 == {
        "policy.dsv4.train_mode": "bf16",
        "policy.dsv4.rollout_profile": "vllm-rocm-gfx950-bf16",
        "policy.dsv4.fake_quant.kv": True,
        "policy.dsv4.fake_quant.indexer": True,
        "policy.generation.vllm_cfg.precision": "bfloat16",
    }


def test_a_rollout_of_its_own_takes_half_the_nodes():
    config = load_config(RECIPES / f"{FLASH_0731}-16n8g-h200-automodel-cp8ep64-noncolocated-qat.yaml")
    assert (config.world_size, config.rollout_gpus, config.data_parallel_size) == (64, 64, 8)
    assert ranks(config)[-1].node == 7


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob(f"{REFERENCE}-*.yaml")), ids=lambda path: path.stem)
def test_modes_of_the_reference_recipe_are_differences_only(recipe):
    mode = recipe.stem.removeprefix(f"{REFERENCE}-")
    a, b = (leaves(load_config(path).model_dump()) for path in (RECIPES / f"{REFERENCE}.yaml", recipe))
    changed = {key: b.get(key) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    assert changed.pop("policy.dsv4.train_mode") == mode
    assert set(changed) == {"logger.log_dir", "logger.wandb.name", "checkpointing.checkpoint_dir"}


def test_the_tiny_model_has_every_kind_of_layer(tiny):
    model = load_config(tiny).policy.dsv4.tiny
    assert model is not None
    assert set(model.compress_ratios) == {0, 4, 128} and model.num_hash_layers >= 1
    widths = (model.hidden_size, model.q_lora_rank, model.o_lora_rank, model.moe_intermediate_size)
    assert any(w % 128 == 0 for w in widths) and any(w % 128 for w in widths)
    assert (model.head_dim - model.qk_rope_head_dim) % 64 == 0


def test_modes_resolve_the_rounding_flags(tiny):
    for mode, expected in (("qat", True), ("bf16", False)):
        dsv4 = load_config(tiny, [f"policy.dsv4.train_mode={mode}"]).policy.dsv4
        assert set(dsv4.fake_quant.resolved(dsv4.train_mode).values()) == {expected}
    dsv4 = load_config(tiny, ["policy.dsv4.fake_quant.kv=false"]).policy.dsv4
    flags = dsv4.fake_quant.resolved(dsv4.train_mode)
    assert flags.pop("kv") is False and all(flags.values())


LARGE = [
    "policy.dtensor_cfg.context_parallel_size=8",
    "policy.dtensor_cfg.expert_parallel_size=128",
    "cluster.num_nodes=16",
    "policy.max_total_sequence_length=3072",
    "policy.make_sequence_length_divisible_by=64",
]


def test_topology_of_the_reference_layout(base_file):
    """16 nodes x 8 GPUs, CP 8, EP 128: data-parallel 16, and every rank its own share of the experts."""
    config = load_config(base_file, LARGE)
    assert mesh_axes(config) == {"dp_replicate": 1, "dp_shard": 16, "cp": 8, "tp": 1, "ep_shard": 1, "ep": 128}
    everyone = ranks(config)
    assert len({(r.dp, r.cp) for r in everyone}) == 128 and [r.ep for r in everyone] == list(range(128))
    assert (everyone[9].node, everyone[9].dp, everyone[9].cp) == (1, 1, 1)
    flow = batch_flow(config)
    assert (flow.rollouts, flow.updates, flow.sequences_per_rank_and_update) == (512, 1, 32)
    assert sequence_multiple(config) == 1024


@pytest.mark.parametrize(("multiple", "ranks_", "wanted"), [(96, 2, 768), (96, 1, 96), (64, 8, 1024), (384, 2, 768)])
def test_padding_is_a_multiple_of_both_numbers(base_file, multiple, ranks_, wanted):
    """C038: the larger of two multiples is a multiple of both only by luck; 96 and 2 x 128 need 768."""
    keys = {"make_sequence_length_divisible_by": multiple, "dtensor_cfg.context_parallel_size": ranks_}
    config = load_config(base_file, [f"policy.{key}={value}" for key, value in keys.items()])
    assert sequence_multiple(config) == wanted


def test_ranks_of_two_expert_groups(tiny):
    config = load_config(
        tiny,
        [
            "policy.dsv4.cpu_processes=4",
            "policy.dtensor_cfg.context_parallel_size=2",
            "policy.dtensor_cfg.expert_parallel_size=2",
        ],
    )
    assert [(r.dp, r.cp, r.ep_shard, r.ep) for r in ranks(config)] == [
        (0, 0, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 1, 0),
        (1, 1, 1, 1),
    ]
    assert config.data_parallel_size == 2
