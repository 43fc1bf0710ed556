"""`train_mode: fp8`: FP8 products, by emulation where no GPU has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.fp8 import SITE, install_fp8
from nemo_rl_dsv4.model.fp8_gemm import fp8_operands, scaled_grouped_mm, scaled_linear, weight_handle, why_emulated
from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant, get_profile

WEIGHT = QuantSpec("e4m3fn", (128, 128), "ue8m0")
INPUT = QuantSpec("e4m3fn", (1, 128), "ue8m0", amax_floor=1e-10, scale_rounding="log2f")
FLOAT_INPUT = replace(INPUT, scale="float32", scale_rounding="bits")
ALL_ON = dict.fromkeys(SWITCHES, True)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 130, 500])
@pytest.mark.parametrize("spec", [INPUT, FLOAT_INPUT], ids=["ue8m0", "float"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_linear_layer_multiplies_and_differentiates_the_rounded_operands(tokens, spec, groups):
    """C037: any number of tokens, 2 x 500 among them; forward and gradients are those of float32 products of rounded
    operands.
    """
    weight = torch.nn.Parameter(randn(2 * 96, 200, seed=1))
    x = randn(2, tokens, *([2] if groups == 2 else []), 200).requires_grad_()
    rounding = WeightRounding(WEIGHT)
    out = scaled_linear(x, weight, rounding.quantized(weight), spec, groups=groups)
    rounded_x = fake_quant(x, spec)
    rounded_w = weight + (fake_quant(weight.detach(), WEIGHT) - weight.detach())
    if groups == 1:
        expected = rounded_x @ rounded_w.T
    else:
        expected = torch.einsum("...gk,grk->...gr", rounded_x, rounded_w.view(2, 96, 200))
    assert out.shape == expected.shape
    # Sums of 200 products in another order; rounded_w above carries one more float32 rounding.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    upstream = randn(*out.shape, seed=2)
    found = torch.autograd.grad(out, (x, weight), upstream)
    wanted = torch.autograd.grad(expected, (x, weight), upstream)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-4)


def test_bf16_products_accumulate_in_float32():
    """Emulation on BF16 tensors: operands are exact in float32 and the sum is rounded once, at the end."""
    weight = torch.nn.Parameter(randn(128, 4096, seed=1, dtype=torch.bfloat16))
    x = randn(5, 4096, dtype=torch.bfloat16)
    out = scaled_linear(x, weight, WeightRounding(WEIGHT).quantized(weight), INPUT)
    exact = fake_quant(x, INPUT).double() @ fake_quant(weight.detach(), WEIGHT).double().T
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("counts", [(5, 0, 9, 2), (0, 0, 0, 16)])
def test_experts_multiply_their_own_rows(counts):
    width = 192
    weight = torch.nn.Parameter(randn(4, 130, 2 * width, seed=1))
    rounding = WeightRounding(WEIGHT, halves=2, transposed=True)
    x = randn(sum(counts) + 3, 130).requires_grad_()  # three rows behind the last expert's
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    handle = weight_handle(weight, x.dtype)
    assert handle.untyped_storage().nbytes() == 4
    out = scaled_grouped_mm(x, handle, ends, rounding.quantized(weight), INPUT)
    upstream = randn(*out.shape, seed=3)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), upstream)
    rounded_x = fake_quant(x.detach(), INPUT)
    rounded_w = torch.cat([fake_quant(half, WEIGHT) for half in weight.detach().chunk(2, -1)], -1)
    assert not out[sum(counts) :].any() and not grad_x[sum(counts) :].any()
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        torch.testing.assert_close(out[rows], rounded_x[rows] @ rounded_w[expert], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad_x[rows], upstream[rows] @ rounded_w[expert].T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad_weight[expert], rounded_x[rows].T @ upstream[rows], rtol=1e-5, atol=1e-4)
        start += count


def test_which_products_are_fp8():
    hopper, gfx950, reference = (get_profile(n) for n in ("vllm-hopper", "vllm-rocm-gfx950", "deepseek-reference"))
    assert fp8_operands(hopper.site("linear.input"), hopper.site("linear.weight"))
    assert not fp8_operands(gfx950.site("o_proj.input"), gfx950.site("linear.weight"))  # a BF16 einsum
    assert not fp8_operands(reference.site("expert.input"), reference.site("expert.weight"))  # FP4 weights
    assert "cpu" in str(why_emulated(torch.device("cpu"), INPUT, 128, 128))


def make_models(config, state, *, experts="torch", profile="vllm-hopper", switches=ALL_ON):
    """The same weights under QAT and under FP8."""
    models = []
    for fp8 in (False, True):
        backend = {**CPU_BACKEND, "experts": experts}
        model = build_model(automodel_config(config), backend=backend, routing_weight_after_down=True, seed=0)
        model.load_state_dict(state)
        report = install_fake_quant(model, get_profile(profile), switches)
        if fp8:
            install_fp8(model, report)
            models.append(report)
        models.append(model)
    return models


@pytest.mark.parametrize("experts", ["torch", "torch_mm"])
def test_the_model_computes_what_qat_computes(tiny_config, training_state, experts):
    """In float32 both multiply the same rounded operands exactly: only the order of sums differs."""
    qat, report, fp8 = make_models(tiny_config, training_state, experts=experts)
    # 5 layers of wq_a, wq_b, wkv, wo_a, wo_b, three shared-expert layers and one stack of experts; 2 indexers.
    assert len(report.wrapped[SITE]) == 5 * 9 + 2
    assert "cpu has no FP8 GEMM" in report.left[SITE]
    assert report.modules["model.layers.0.self_attn.wo_a"].endswith("; products in FP8")
    assert "FP8" not in report.modules["model.layers.0.mlp.gate"]
    ids = torch.randint(3, 160, (2, 150), generator=torch.Generator().manual_seed(3))
    losses, grads = [], []
    for model in (qat, fp8):
        loss = model(ids).logits.float().logsumexp(-1).mean()
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)  # measured 2e-7
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        # Another order of sums moves a value across a rounding boundary now and then.
        error = float((grad - grads[0][name]).norm() / grads[0][name].norm().clamp_min(1e-12))
        assert error < 0.05, (name, error)


def test_activation_checkpointing_keeps_the_bits(tiny_config, training_state):
    from nemo_automodel.components.moe.parallelizer import apply_ac

    ids = torch.randint(3, 160, (1, 70), generator=torch.Generator().manual_seed(3))
    results = []
    for checkpointed in (False, True):
        *_, model = make_models(tiny_config, training_state)
        if checkpointed:
            apply_ac(model)
        loss = model(ids).logits.float().logsumexp(-1).sum()
        loss.backward()
        experts = next(p.grad for n, p in model.named_parameters() if n.endswith("gate_and_up_projs"))
        results.append((loss.detach(), experts.clone()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_errors_name_what_is_wrong(tiny_config, training_state):
    with pytest.raises(UserError, match="no product whose operands are both FP8"):
        make_models(tiny_config, training_state, switches={**ALL_ON, "weights": False})
    model = build_model(automodel_config(tiny_config), routing_weight_after_down=True, seed=0)
    attention = model.model.layers["0"].self_attn
    report = install_fake_quant(model, get_profile("vllm-hopper"), ALL_ON)
    attention.wq_a.bias = torch.nn.Parameter(torch.zeros(attention.wq_a.out_features))
    with pytest.raises(UserError, match="wq_a is a .* with a bias"):
        install_fp8(model, report)
