"""Facts of the built model that the rollout relies on."""

from __future__ import annotations

import pytest
import torch
from nemo_automodel.components.models.deepseek_v4 import cp, layers
from nemo_automodel.components.moe.experts import swiglu_clamped_deepep
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model, materialize, resolve_dtype
from nemo_rl_dsv4.model.checkpoint_format import automodel_config, transformers_config
from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind


def test_every_indexer_parameter_is_frozen(tiny_config):
    """C067: top-k passes no gradient, but AdamW would still decay an unfrozen indexer under context parallelism."""
    model = build_model(automodel_config(tiny_config), seed=0)
    indexer = {name: p.requires_grad for name, p in model.named_parameters() if ".indexer." in name}
    assert len(indexer) == 12 and not any(indexer.values())
    assert sum(p.requires_grad for p in model.parameters()) > 100


MASK_DTYPE = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "sliding_window": 2}


@pytest.mark.parametrize(
    "build",
    [
        lambda: layers.build_causal_padding_mask(torch.tensor([[0, 1, 1, 0]]), 4, batch_size=1, **MASK_DTYPE),
        lambda: layers.build_packed_causal_padding_mask(torch.tensor([[2, 1]]), 4, **MASK_DTYPE),
        lambda: cp.build_dsv4_cp_causal_padding_mask(
            position_ids=torch.arange(4)[None],
            key_len=4,
            cp_group=None,
            padding_mask=torch.tensor([[True, False, False, True]]),
            **MASK_DTYPE,
        ),
        lambda: cp.build_dsv4_cp_packed_causal_padding_mask(
            position_ids=torch.tensor([[0, 1, 0, 0]]),
            packed_seq_ids=torch.tensor([[1, 1, 2, 0]]),
            cp_group=None,
            padding_mask=torch.tensor([[False, False, False, True]]),
            **MASK_DTYPE,
        ),
    ],
    ids=["rows", "packed", "cp", "packed cp"],
)
def test_cells_masked_twice_stay_finite(build):
    """C069: padding and the future mask the same cell; added, two lowest BF16 values are -inf."""
    mask = build()
    assert mask.shape == (1, 1, 4, 4) and mask.dtype == torch.bfloat16
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}
    assert mask[0, 0, 0, 3] < 0 and mask[0, 0, 1, 1] == 0  # padded and in the future; a token sees itself


def test_padding_in_bfloat16_gives_finite_gradients(tiny_config):
    """C069: two lowest values added in BF16 overflow to -inf, and 0 * inf is NaN in the backward pass."""
    model = build_model(automodel_config(tiny_config), dtype=torch.bfloat16, seed=0)
    ids = torch.randint(3, 160, (2, 140), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(140) >= torch.tensor([[60], [140]])
    model(ids, padding_mask=padding).logits.float().logsumexp(-1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) > 100
    assert [name for name, grad in grads.items() if not torch.isfinite(grad).all()] == []


def test_fp32_parts_stay_fp32_in_a_bfloat16_model(tiny_config):
    """C079: hyper-connections, sinks, position tables, router bias and router scores."""
    model = build_model(automodel_config(tiny_config), dtype=torch.bfloat16, seed=0)
    kinds = {name: tensor_kind(name) for name in expected_tensors(tiny_config)}
    assert "fp32" in kinds.values()
    low = [
        name
        for name, value in model.state_dict().items()
        if any(part in name for part in ("_hc.", "hc_head", "sinks", "ape_param", "e_score_correction"))
        and value.dtype != torch.float32
    ]
    assert low == []
    gate = model.model.layers["1"].mlp.gate
    assert gate.gate_precision == torch.float32


def test_a_bfloat16_model_chooses_the_experts_of_float32_scores(tiny_config):
    """C079: of 512 tokens, BF16 scores would send 30 to another set of six experts."""
    small = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
    wide = tiny_config | small | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 8}
    gate = build_model(automodel_config(wide), dtype=torch.bfloat16, seed=0).model.layers["0"].mlp.gate
    torch.nn.init.normal_(gate.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        chosen = gate(x, torch.ones(512, dtype=torch.bool), None)[1].sort(-1).values
        high = torch.nn.functional.softplus(x.float() @ gate.weight.float().T).sqrt()
        low = torch.nn.functional.softplus(x @ gate.weight.to(torch.bfloat16).T).sqrt()
    assert gate.weight.shape == (64, 128)
    assert torch.equal(chosen, high.topk(6).indices.sort(-1).values)
    assert (low.topk(6).indices.sort(-1).values != chosen).any(-1).sum() > 10  # the rows tell the two apart


def test_index_zero_of_the_pool_is_not_lost():
    """C068: -1 was clamped to 0 and then written over the real 0."""
    mask = layers._build_indexer_topk_compressed_mask(torch.zeros(1, 1, 1, 4), torch.tensor([[[0, -1, -1]]]), 4)
    assert (mask == 0).flatten().tolist() == [True, False, False, False]


def test_rotary_tables_at_the_released_sizes(tiny_config):
    """C066, C077: 64 of 512 channels turn, and position 131,071 (8 x 16,384) is computed, not looked up."""
    released = {"head_dim": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 1, "compress_ratios": [0]}
    built = build_model(automodel_config(tiny_config | released | {"num_hash_layers": 0}), device=torch.device("meta"))
    model = materialize(built, torch.device("cpu")).model
    plain = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(model.rotary_emb.inv_freq.double(), plain, rtol=1e-6, atol=0)
    for rotary in (model.rotary_emb, model.rotary_emb_compress):
        assert rotary.inv_freq.shape == (32,)
        cos, sin = rotary(torch.zeros(1, 2, 8), torch.tensor([[0, 131071]]))
        angle = 131071 * rotary.inv_freq.double()
        # Measured 1.33e-3 and 1.59e-3; half a float32 step of the largest angles is 3.9e-3.
        assert (cos[0, 1, :32] - angle.cos()).abs().max() < 1.4e-3
        assert (sin[0, 1, :32] - angle.sin()).abs().max() < 1.7e-3


@pytest.mark.parametrize("which", ["routed", "shared", "transformers"])
def test_swiglu_is_clamped(tiny_config, which):
    """C078: gate at most 10, up within +-10, in shared experts too: silu(10) * -10 = -99.9955."""
    gate, up = torch.full((1, 192), 20.0), torch.full((1, 192), -20.0)
    if which == "routed":
        out = swiglu_clamped_deepep(torch.cat([gate, up], -1), torch.ones(1, 1), 10.0)
    elif which == "shared":
        mlp = build_model(automodel_config(tiny_config), seed=0).model.layers["0"].mlp.shared_experts
        assert mlp.swiglu_limit == 10.0
        for linear, value in ((mlp.gate_proj, 20.0), (mlp.up_proj, -20.0)):
            torch.nn.init.constant_(linear.weight, value / 128)
        torch.nn.init.constant_(mlp.down_proj.weight, 1 / 192)
        out = mlp(torch.ones(1, 128))
    else:
        experts = hf.DeepseekV4Experts(transformers_config(tiny_config))
        out = experts._apply_gate(torch.cat([gate, up], -1))
    torch.testing.assert_close(out, torch.full_like(out, -99.99546), rtol=1e-5, atol=0)


def test_expert_outputs_are_summed_in_float32(tiny_config):
    """C080: k expert outputs in BF16 are reduced in FP32 and cast once."""
    tiny_config["num_experts_per_tok"] = 6
    model = build_model(automodel_config(tiny_config), dtype=torch.bfloat16, routing_weight_after_down=True, seed=0)
    experts = model.model.layers["1"].mlp.experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 128, generator=generator).bfloat16()
    indices = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(16)])
    weights = torch.rand(16, 6, generator=generator)
    found = experts(x, torch.ones(16, dtype=torch.bool), weights, indices)
    expected = torch.zeros(16, 128)
    for token in range(16):
        for slot in range(6):
            expert = int(indices[token, slot])
            hidden = swiglu_clamped_deepep(x[token] @ experts.gate_and_up_projs[expert], torch.ones(1), 10.0)
            expected[token] += (hidden @ experts.down_projs[expert]).float() * weights[token, slot]
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-8, atol=1e-6)


def test_an_unknown_precision_is_named():
    with pytest.raises(UserError, match="policy.precision is 'float16'; wanted one of"):
        resolve_dtype("float16")


def test_a_checkpointed_model_on_the_meta_device_gets_its_memory(tiny_config):
    """Activation checkpointing puts a wrapper into module paths but not into the state dict; tid2eid was not found."""
    from nemo_automodel.components.moe.parallelizer import apply_ac

    small = tiny_config | {"num_hidden_layers": 2, "compress_ratios": [0, 4]}
    model = build_model(automodel_config(small), device=torch.device("meta"))
    apply_ac(model)
    materialize(model, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.isfinite(model.model.rotary_emb.inv_freq).all()
