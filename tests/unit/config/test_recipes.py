"""The recipes that ship."""

from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.config.topology import batch_flow, mesh_axes, ranks, sequence_multiple

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


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_valid(recipe):
    assert validate(load_config(recipe, ["runtime=embedded"]), runs_here=False) == "embedded"


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
    assert engine.env_vars == {"VLLM_USE_DEEP_GEMM_E8M0": "1"}
    assert policy.generation.vllm_kwargs["attention_backend"] == "FLASHMLA_SPARSE_DSV4"
    assert config.logger.wandb_enabled and policy.dsv4.gpu == "h100"


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
