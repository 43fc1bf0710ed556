"""Layout and forward of the real model, built on shapes alone, against the model with memory."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.planning import memory as mem
from nemo_rl_dsv4.planning.forward import check_forward
from nemo_rl_dsv4.planning.layout import lay_out
from nemo_rl_dsv4.planning.live_bytes import LiveBytes
from nemo_rl_dsv4.planning.plan import stored_parameters
from nemo_rl_dsv4.policy.optim import build_optimizer
from nemo_rl_dsv4.policy.parallel import ParallelSizes


@pytest.fixture(scope="module")
def config_of_three(config_once):
    """Three Sinkhorn iterations in place of twenty: each keeps the same shapes."""
    return {**config_once, "hc_sinkhorn_iters": 3}


@pytest.fixture(scope="module")
def alone(config_once):
    return lay_out(config_once, ParallelSizes(1), compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def real(config_of_three):
    return build_model(automodel_config(config_of_three), seed=0)


def test_one_rank_holds_what_the_real_model_holds(alone, real):
    """Names, shapes and dtypes are those of the model with memory; so are bytes of weights, gradients and moments."""
    found = {p.name: (p.shape, p.local_shape, p.dtype, p.trainable) for p in alone.placements}
    assert found == {
        name: (tuple(p.shape), tuple(p.shape), p.dtype, p.requires_grad) for name, p in real.named_parameters()
    }
    buffers = sum(b.numel() * b.element_size() for b in real.buffers())
    assert mem.weight_bytes(alone) == sum(p.numel() * p.element_size() for p in real.parameters()) + buffers
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    grads = [p.grad for p in real.parameters() if p.grad is not None]
    assert mem.gradient_bytes(alone) == sum(g.numel() * g.element_size() for g in grads)
    optimizer = build_optimizer(real.parameters(), "torch.optim.AdamW", {"lr": 1e-3})
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert mem.optimizer_bytes(alone) == sum(value.numel() * value.element_size() for value in states)
    optimizer.zero_grad(set_to_none=True)
    assert alone.gathered_bytes == 0 and alone.units == ()


def test_parameters_agree_with_the_checkpoints_own_list(alone, config_once):
    assert alone.parameters == stored_parameters(config_once)


@pytest.mark.parametrize(
    ("sizes", "experts"),
    [(ParallelSizes(4, cp=2, ep=2), (4, 2)), (ParallelSizes(4, ep=4), (2, 1)), (ParallelSizes(2), (8, 2))],
    ids=str,
)
def test_ranks_divide_every_parameter(config_once, alone, sizes, experts):
    """Local shards of all ranks add up to the model; experts are cut by ep first, then by ep_shard."""
    ranks = [lay_out(config_once, sizes, rank=rank, compute_dtype=torch.float32) for rank in range(sizes.world)]
    for index, whole in enumerate(alone.placements):
        held = [rank.placements[index] for rank in ranks]
        assert sum(placement.local_numel for placement in held) == whole.numel, whole.name
    assert mem.weight_bytes(ranks[0]) == max(mem.weight_bytes(rank) for rank in ranks)
    placement = next(p for p in ranks[0].placements if p.name.endswith("experts.down_projs"))
    local_experts, shards = experts
    assert placement.local_numel == placement.numel * local_experts // 8 // shards
    trainable = sum(p.numel for p in alone.placements if p.trainable)
    own = sum(p.numel for p in ranks[0].placements if p.kind == "experts" and p.trainable)
    units = sum(unit.trainable_numel for unit in ranks[0].units)
    expert_units = own // sizes.ep if shards > 1 else 0
    assert units == trainable - own + expert_units


def test_live_bytes_count_what_is_alive():
    given = torch.empty(256, device="meta")
    with LiveBytes([given]) as live:
        first = given + 1
        assert live.now == 1024
        second = first.view(16, 16) * 2
        assert live.now == 2048
        del first
        assert live.now == 1024
        del second
    assert (live.now, live.peak) == (0, 2048)


def test_saved_activations_match_the_real_blocks(config_of_three, real):
    """What a block keeps for its backward, on shapes and on the real model with the same stand-in for experts."""
    from nemo_rl_dsv4.planning.forward import _LocalExperts

    check = check_forward(config_of_three, ParallelSizes(1), rows=2, length=256, dtype=torch.float32)
    assert check.logits_shape == (2, 256, config_of_three["vocab_size"]) and check.hidden_shape == (2, 256, 4, 128)
    assert check.blocks_run == 5 and [b.kind for b in check.blocks] == [
        "ratio 0, hashed",
        "ratio 0",
        "ratio 4",
        "ratio 128",
    ]
    assert [b.count for b in check.blocks] == [1, 1, 2, 1]
    block, measured = real.model.layers["2"], check.blocks[2]
    experts, block.mlp.experts = block.mlp.experts, _LocalExperts(block.mlp.experts, 1, gathers=False)
    for parameter in block.mlp.experts.parameters():
        parameter.data = torch.zeros(parameter.shape)
    caught = []
    handle = block.register_forward_hook(lambda _, a, k, o: caught.append((a, k)), with_kwargs=True)
    ids, padding = torch.zeros(2, 256, dtype=torch.long), torch.zeros(2, 256, dtype=torch.bool)
    with torch.no_grad():
        real(ids, padding_mask=padding)
    handle.remove()
    call = {**caught[0][1], "x": caught[0][1]["x"].requires_grad_(True)}
    tensors = tree_leaves(list(call.values()))
    existing = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    existing += [*block.parameters(), *block.buffers(), *call["rotary_compress"].buffers()]
    with LiveBytes(existing) as live:
        output = block(**call)
        saved = live.now
        output.sum().backward()
    block.mlp.experts = experts
    real.zero_grad(set_to_none=True)
    assert measured.input == call["x"].numel() * 4
    assert math.isclose(saved, measured.saved, rel_tol=0.02), (saved, measured.saved)
    assert math.isclose(live.peak, measured.peak, rel_tol=0.05), (live.peak, measured.peak)


def test_context_parallel_ranks_run_a_part_of_the_row(config_of_three):
    check = check_forward(config_of_three, ParallelSizes(4, cp=2, ep=4), rows=1, length=512, dtype=torch.float32)
    assert check.ids_shape == (1, 256) and check.logits_shape == (1, 256, config_of_three["vocab_size"])
