"""Alignment switches: no bit of a float32 model, a visible effect each in BF16, and agreement with the BF16 rollout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_numerics import flash_attention
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.model import alignment, seams_attention, seams_linear
from nemo_rl_dsv4.model.alignment import install_alignment, resolve_alignment
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model, compute_rotary_frequencies, materialize
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES as SITE_GROUPS
from nemo_rl_dsv4.model.qat import install_numerics
from nemo_rl_dsv4.numerics import get_profile, products
from nemo_rl_dsv4.numerics.alignment import DIFFERENCES, SWITCHES
from nemo_rl_dsv4.refit import export_weights

HOPPER = get_profile("vllm-hopper")
NONE = dict.fromkeys(SWITCHES, False)
IDS = torch.randint(3, 160, (2, 150), generator=torch.Generator().manual_seed(5))


def make_model(config, state, dtype):
    # An unset gate_precision is AutoModel's default: the router multiplies in the activations' dtype.
    backend = {**CPU_BACKEND, "gate_precision": None}
    model = build_model(automodel_config(config), dtype=dtype, backend=backend, seed=0)
    model.load_state_dict(state)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def plain(config_once, training_once):
    """Logits of AutoModel as it is."""
    return {dtype: logits(make_model(config_once, training_once, dtype)) for dtype in (torch.float32, torch.bfloat16)}


def test_switches_that_move_bf16_casts_change_no_bit_of_a_float32_model(config_once, training_once, plain):
    model = make_model(config_once, training_once, torch.float32)
    found = install_alignment(model, HOPPER, {row.switch: not row.float32 for row in DIFFERENCES})
    assert sum(text.startswith("on") for text in found.values()) == 12
    assert torch.equal(logits(model), plain[torch.float32])


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_alone_changes_a_bf16_model(config_once, training_once, plain, switch):
    """C079, C080: float32 router, softmax and sums where the rollout has them."""
    model = make_model(config_once, training_once, torch.bfloat16)
    found = install_alignment(model, HOPPER, {**NONE, switch: True})
    assert found[switch].startswith("on") and all(v == "off" for k, v in found.items() if k != switch)
    assert not torch.equal(logits(model), plain[torch.bfloat16])


def test_all_off_is_automodel_as_it_is(config_once, training_once, plain):
    model = make_model(config_once, training_once, torch.bfloat16)
    install_alignment(model, HOPPER, NONE)
    assert torch.equal(logits(model), plain[torch.bfloat16])


def test_yarn_reaches_window_layers_only_where_the_engine_has_it(config_once, training_once):
    """C076: ratio-0 layers have theta 10000 and no YaRN, except in vLLM up to 0.29."""
    model = make_model(config_once, training_once, torch.float32)
    before = model.model.rotary_emb.inv_freq.clone()
    install_alignment(model, get_profile("deepseek-reference"))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    model = make_model(config_once, training_once, torch.float32)
    install_alignment(model, HOPPER)
    after = model.model.rotary_emb.inv_freq
    assert torch.equal(after[0], before[0]) and torch.allclose(after[-1], before[-1] / 16)
    on_meta = build_model(automodel_config(config_once), seed=0, device=torch.device("meta"))
    install_alignment(on_meta, HOPPER)
    assert torch.equal(materialize(on_meta, torch.device("cpu")).model.rotary_emb.inv_freq, after)
    compressed = model.model.rotary_emb_compress.inv_freq.clone()
    for rotary in (model.model.rotary_emb, model.model.rotary_emb_compress):
        rotary.inv_freq.zero_()
    compute_rotary_frequencies(model, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, after)
    assert torch.equal(model.model.rotary_emb_compress.inv_freq, compressed)
    engine = ReferenceEngine(config_once, HOPPER)
    torch.testing.assert_close(engine.model.model.rotary_emb.main_inv_freq, after)
    without = make_model({**config_once, "rope_scaling": None}, training_once, torch.float32)
    assert install_alignment(without, HOPPER)["yarn_on_window_layers"] == "on, but the model has no YaRN"


def test_an_aligned_bf16_trainer_is_nearer_to_the_bf16_rollout(config_once, training_once):
    """Rounding alone leaves AutoModel's own casts, which the switches remove."""
    stored = make_model(config_once, training_once, torch.bfloat16).state_dict()
    engine = ReferenceEngine(config_once, HOPPER, dtype=torch.bfloat16)
    engine.update_weights(export_weights(stored, "vllm-hopper", unquantized=torch.bfloat16))
    rollout = engine.score(IDS)[:, 1:]
    distance = {}
    for name, overrides in (("aligned", {}), ("rounded", {**NONE, "routing_weight_after_down": True})):
        model = make_model(config_once, stored, torch.bfloat16)
        install_numerics(model, HOPPER, dict.fromkeys(SITE_GROUPS, True), overrides)
        found = torch.log_softmax(logits(model)[:, :-1].float(), -1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
        distance[name] = float((found - rollout).abs().mean())
    assert distance["aligned"] * 4 < distance["rounded"], distance


@pytest.mark.parametrize("length", [24, 200])
def test_attention_weights_are_those_of_the_engines_blocks(length):
    """AutoModel's dense attention against the CPU engine's walk over blocks: window, compressed entries, sinks."""
    generator = torch.Generator().manual_seed(length)
    entries, heads, width, window = length // 4, 4, 64, 128
    query = torch.randn(2, heads, length, width, generator=generator).bfloat16()
    keys = (2 * torch.randn(2, 1, length + entries, width, generator=generator)).bfloat16()
    at = torch.arange(length)
    seen = (at[:, None] >= at) & (at[:, None] - at < window)
    seen = torch.cat([seen, torch.arange(entries) < ((at + 1) // 4)[:, None]], -1).expand(2, 1, -1, -1)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    sinks = torch.randn(heads, generator=generator)
    module = SimpleNamespace(sinks=sinks, sinks_param=lambda _: sinks, sliding_window=window)
    seam = SimpleNamespace(_attention_fp32=True)
    call = seams_attention._Call([], torch.bfloat16, seam, length)
    trained = seams_attention._attend_rounded(module, query, keys, keys, call, mask, scaling=width**-0.5)
    rolled = flash_attention(module, query, keys, keys, entries, mask, scaling=width**-0.5)
    rolled = rolled.bfloat16().transpose(1, 2)
    assert (trained != rolled).float().mean() < 2e-3
    probs = (query.float() @ keys.float().transpose(2, 3) * width**-0.5).masked_fill(~seen, -torch.inf)
    probs = torch.cat([probs, sinks.view(1, -1, 1, 1).expand(2, -1, length, 1)], -1).softmax(-1)[..., :-1]
    unrounded = (probs @ keys.float()).bfloat16().transpose(1, 2)
    assert (unrounded != rolled).float().mean() > 0.1
    with pytest.raises(UserError, match="attention_dropout is 0.1; .* wants 0"):
        seams_attention._attend_rounded(module, query, keys, keys, call, mask, scaling=1.0, dropout=0.1)


def test_gradients_reach_every_parameter_and_float32_weights_unrounded(config_once, training_once):
    model = make_model(config_once, training_once, torch.bfloat16)
    install_numerics(model, HOPPER, dict.fromkeys(SITE_GROUPS, True))
    model(IDS).logits.float().logsumexp(-1).sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trained.items() if p.grad is None]
    assert missing == []
    assert all(bool(p.grad.isfinite().all()) for p in trained.values())
    for name in ("lm_head.weight", "model.layers.2.self_attn.compressor.wkv.weight"):
        grad = trained[name].grad
        assert grad.dtype == torch.float32 and not torch.equal(grad, grad.to(torch.bfloat16).float())


def test_overrides_and_defaults():
    assert resolve_alignment(HOPPER) == HOPPER.alignment
    assert resolve_alignment(HOPPER, {"rope_fp32": False, "gate_fp32": None})["rope_fp32"] is False
    assert resolve_alignment(HOPPER, {"gate_fp32": None})["gate_fp32"] is True
    with pytest.raises(UserError, match="unknown keys \\['rope'\\]; wanted some of \\['rope_fp32'"):
        resolve_alignment(HOPPER, {"rope": True})


def test_products_of_bf16_values_are_taken_as_the_engine_takes_them(config_once, training_once, monkeypatch):
    """On a GPU: attention scores, routers, compressors and the head, once each; other sums are all that differs."""
    names = ("attention_fp32", "attention_probs_bf16", "gate_fp32", "compressor_fp32", "logits_bf16")
    on = {**NONE, **dict.fromkeys(names, True)}
    model = make_model(config_once, training_once, torch.bfloat16)
    install_alignment(model, HOPPER, on)
    on_cpu, taken = logits(model), []
    for module in (alignment, seams_linear, products):
        monkeypatch.setattr(module, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(products, "_Bf16Product", Counting(products._Bf16Product, taken))
    on_gpu = logits(model)
    ratios = config_once["compress_ratios"][: config_once["num_hidden_layers"]]
    compressors = sum(ratio > 0 for ratio in ratios) + sum(ratio == 4 for ratio in ratios)  # an indexer has its own
    assert len(taken) == 2 * len(ratios) + 2 * compressors + 1
    assert taken[-1][1][1] == config_once["vocab_size"]
    assert float((on_gpu - on_cpu).square().mean().sqrt()) < 0.02 * float(on_cpu.std())


class Counting:
    """An autograd function that notes its arguments, as the product reads them."""

    def __init__(self, function, taken):
        self._function, self._taken = function, taken

    def apply(self, a, b):
        assert all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in (a, b)), "a product of more than BF16 values"
        self._taken.append((a.shape, b.shape))
        return self._function.apply(a, b)
