"""BF16 compute over float32 masters in one process."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.fp8 import install_fp8
from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.master_weights import compute_in, quantize_in, to_master_weights


def make(config, mode, masters):
    model = build_model(automodel_config(config), dtype=torch.bfloat16, routing_weight_after_down=True, seed=0)
    dtypes = to_master_weights(model) if masters else {}
    if mode != "bf16":
        report = install_fake_quant(model, get_profile("vllm-hopper"), dict.fromkeys(SWITCHES, True))
        if mode == "fp8":
            install_fp8(model, report)
    if masters:
        quantize_in(model, dtypes)
        compute_in(model, dtypes)
    return model.train()


@pytest.mark.parametrize("mode", ["bf16", "qat", "fp8"])
def test_masters_compute_what_a_bf16_model_computes(tiny_config, mode):
    """Right after a BF16 start both hold the same values: losses are equal bit for bit, gradients are float32."""
    tiny_config["num_hidden_layers"], tiny_config["compress_ratios"] = 2, [0, 4]
    ids = torch.randint(3, 160, (1, 24), generator=torch.Generator().manual_seed(3))
    losses, grads = [], []
    for masters in (False, True):
        model = make(tiny_config, mode, masters)
        loss = model(ids).logits.float().logsumexp(-1).mean()
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    assert grads[0].keys() == grads[1].keys()
    assert {grad.dtype for grad in grads[1].values()} == {torch.float32}
    for name, grad in grads[1].items():
        torch.testing.assert_close(grad, grads[0][name].float(), rtol=2e-2, atol=1e-6, msg=name)


def test_updates_below_a_bf16_step_add_up(tiny_config):
    """BF16 parameters lost every update under half a step of theirs: 100 of 1e-4 left a weight of 1 at 1."""
    tiny_config["num_hidden_layers"], tiny_config["compress_ratios"] = 1, [0]
    model = make(tiny_config, "bf16", True)
    weight = model.model.layers["0"].self_attn.q_norm.weight
    assert weight.dtype == torch.float32
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.99), rtol=1e-5, atol=0)


def overlaid(model):
    """Modules that hold a floating-point tensor beside their parameters; AutoModel's hash gate keeps token ids so."""
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def test_nothing_stays_overlaid_when_a_layer_fails(tiny_config):
    tiny_config["num_hidden_layers"], tiny_config["compress_ratios"] = 1, [0]
    model = make(tiny_config, "bf16", True)
    seen = []
    broken = model.model.layers["0"].mlp.register_forward_pre_hook(lambda *_: seen.append(overlaid(model)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.full((1, 8), 5))
    assert seen[0], "a layer computes with copies while it runs"
    assert not overlaid(model)
    broken.remove()
    model(torch.full((1, 8), 5))
    assert not overlaid(model)
