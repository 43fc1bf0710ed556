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
    assert validate(load_config(recipe, ["runtime=embedded"])) == "embedded"


def test_bf16_and_qat_differ_in_the_train_mode_and_in_where_they_write():
    changed = difference("bf16", "qat")
    assert changed.pop("policy.dsv4.train_mode") == ("bf16", "qat")
    assert set(changed) == {"logger.log_dir", "checkpointing.checkpoint_dir"}


def test_cp2ep2_differs_from_qat_in_the_layout_and_in_where_it_writes():
    changed = difference("qat", "cp2ep2-qat")
    assert changed.pop("policy.dtensor_cfg.context_parallel_size") == (1, 2)
    assert changed.pop("policy.dtensor_cfg.expert_parallel_size") == (1, 2)
    assert changed.pop("policy.dtensor_cfg.dp_replicate_size") == (2, 1)
    shorter = {"grpo.max_num_steps", "grpo.val_period", "grpo.max_val_samples", "grpo.val_batch_size"}
    places = {"logger.log_dir", "checkpointing.checkpoint_dir"}
    assert set(changed) <= {"policy.dsv4.cpu_processes"} | places | shorter


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
