"""Fake quantization installed on AutoModel's modules from outside."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, automodel_config
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant, invalidate_rounded_weights
from nemo_rl_dsv4.numerics import fake_quant, get_profile, quantize

ALL_ON = dict.fromkeys(SWITCHES, True)
WEIGHTS_ONLY = {**dict.fromkeys(SWITCHES, False), "weights": True}


def make_model(config, state, *, after_down=True):
    model = build_model(automodel_config(config), routing_weight_after_down=after_down, seed=0)
    model.load_state_dict(state)
    return model


def tokens(rows=2, length=150):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(3))


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_every_site_of_the_hopper_profile_gets_a_seam(tiny_config, training_state):
    model = make_model(tiny_config, training_state)
    names_before = set(model.state_dict())
    report = install_fake_quant(model, get_profile("vllm-hopper"), ALL_ON)
    counts = {site: len(names) for site, names in report.wrapped.items()}
    # 5 layers, 3 with a compressor, 2 of those with an indexer: (wq_a, wq_b, wkv, wo_b) x5, shared experts 3x5,
    # indexer 2.
    assert counts == {
        "linear.weight": 42,
        "linear.input": 37,
        "o_proj.input": 5,
        "expert.weight": 5,
        "expert.input": 5,
        "expert.hidden": 5,
        "kv.swa": 5,
        "kv.compressed": 3,
        "indexer.q": 2,
        "indexer.k": 2,
    }
    assert not report.left
    assert set(model.state_dict()) == names_before


def test_rounding_weights_equals_a_model_that_holds_rounded_weights(tiny_config, training_state):
    """Forward and gradients: the overlay computes with the rounded weight and hands its gradient to the weight."""
    spec = get_profile("vllm-hopper").site("linear.weight")
    rounded_state = {key: value.clone() for key, value in training_state.items()}
    for name, slot in AUTOMODEL.split(rounded_state):
        if tensor_kind(name) in ("linear.weight", "expert.weight"):
            part = AUTOMODEL.view(rounded_state[slot.key], slot)
            part.copy_(fake_quant(part.contiguous(), spec))
    plain = make_model(tiny_config, rounded_state)
    qat = make_model(tiny_config, training_state)
    install_fake_quant(qat, get_profile("vllm-hopper"), WEIGHTS_ONLY)
    ids = tokens()
    torch.testing.assert_close(logits(qat, ids), logits(plain, ids), rtol=0, atol=0)
    for model in (plain, qat):
        model(ids).logits.float().logsumexp(-1).sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), qat.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0, msg=name)


def test_weights_are_rounded_once_until_they_change(tiny_config, training_state, monkeypatch):
    model = make_model(tiny_config, training_state)
    install_fake_quant(model, get_profile("vllm-hopper"), WEIGHTS_ONLY)
    from nemo_rl_dsv4.model import weight_rounding

    calls = []
    monkeypatch.setattr(weight_rounding, "quantize", lambda x, spec: calls.append(x.shape) or quantize(x, spec))
    ids = tokens(1, 40)
    logits(model, ids)
    first = len(calls)
    assert first == 42 + 5 * 3  # linear weights, and gate, up and down of 5 expert stacks
    logits(model, ids)
    assert len(calls) == first
    with torch.no_grad():
        model.model.layers["0"].self_attn.wq_a.weight.mul_(1.5)
    logits(model, ids)
    assert len(calls) == first + 1
    invalidate_rounded_weights(model)
    logits(model, ids)
    assert len(calls) == first + 1 + first


def test_activation_checkpointing_keeps_the_bits(tiny_config, training_state):
    from nemo_automodel.components.moe.parallelizer import apply_ac

    losses = []
    for checkpointed in (False, True):
        model = make_model(tiny_config, training_state)
        install_fake_quant(model, get_profile("vllm-hopper"), ALL_ON)
        if checkpointed:
            apply_ac(model)
        model.train()
        loss = model(tokens(1, 140)).logits.float().logsumexp(-1).sum()
        loss.backward()
        grad = next(p.grad for n, p in model.named_parameters() if n.endswith("wq_b.weight") and "indexer" not in n)
        losses.append((loss.detach(), grad.clone()))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_each_switch_changes_the_output(tiny_config, training_state, switch):
    ids = tokens()
    plain = logits(make_model(tiny_config, training_state), ids)
    model = make_model(tiny_config, training_state)
    install_fake_quant(model, get_profile("vllm-hopper"), {**dict.fromkeys(SWITCHES, False), switch: True})
    # index_topk 64 exceeds the 37 compressed entries of 150 tokens, so every entry is selected whatever its score.
    expected_equal = switch == "indexer"
    assert torch.equal(logits(model, ids), plain) == expected_equal


def test_indexer_rounding_changes_the_selection_when_there_is_a_choice(tiny_config, training_state):
    tiny_config["index_topk"] = 8
    ids = tokens(2, 256)
    plain = logits(make_model(tiny_config, training_state), ids)
    model = make_model(tiny_config, training_state)
    install_fake_quant(model, get_profile("vllm-hopper"), {**dict.fromkeys(SWITCHES, False), "indexer": True})
    assert not torch.equal(logits(model, ids), plain)


def test_kv_rounding_leaves_the_rope_channels(tiny_config, training_state):
    model = make_model(tiny_config, training_state)
    install_fake_quant(model, get_profile("vllm-hopper"), {**dict.fromkeys(SWITCHES, False), "kv": True})
    norm = model.model.layers["0"].self_attn.kv_norm
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.functional.rms_norm(x, (80,), norm.weight, eps=1e-6)
    rounded = norm(x)
    torch.testing.assert_close(rounded[:, 64:], plain[:, 64:])
    assert (rounded[:, :64] - plain[:, :64]).abs().max() > 1e-3


def test_profile_that_rounds_nothing_installs_nothing(tiny_config, training_state):
    model = make_model(tiny_config, training_state)
    report = install_fake_quant(model, get_profile("bf16"), ALL_ON)
    assert report.wrapped == {}
    assert set(report.left) == {site for sites in SWITCHES.values() for site in sites}


def test_errors_name_what_is_wrong(tiny_config, training_state):
    profile = get_profile("vllm-hopper")
    model = make_model(tiny_config, training_state)
    with pytest.raises(UserError, match="unknown keys \\['attention'\\]"):
        install_fake_quant(model, profile, {"attention": True})
    install_fake_quant(model, profile, ALL_ON)
    with pytest.raises(UserError, match="prepared once"):
        install_fake_quant(model, profile, ALL_ON)
    with pytest.raises(UserError, match="routing weight before the down projection"):
        install_fake_quant(make_model(tiny_config, training_state, after_down=False), profile, ALL_ON)
    with pytest.raises(UserError, match="has no such module"):
        plain = torch.nn.Linear(2, 2)
        plain.config = type("Config", (), {"qk_rope_head_dim": 16})()
        install_fake_quant(plain, profile, ALL_ON)


def test_a_model_without_compressors_reports_the_sites_it_lacks(tiny_config):
    tiny_config["compress_ratios"] = [0, 0, 0, 0, 0]
    model = build_model(automodel_config(tiny_config), routing_weight_after_down=True, seed=0)
    report = install_fake_quant(model, get_profile("vllm-hopper"), ALL_ON)
    assert {"kv.compressed", "indexer.q", "indexer.k"} == set(report.left)
