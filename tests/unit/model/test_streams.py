"""Hyper-connection seams: what a BF16 block computes between its modules, against the engine's formulas and engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.model import seams_streams
from nemo_rl_dsv4.model.alignment import install_alignment
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES as SITE_GROUPS
from nemo_rl_dsv4.model.qat import install_numerics
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.numerics import products as numerics_products
from nemo_rl_dsv4.numerics.alignment import SWITCHES
from nemo_rl_dsv4.numerics.hyper_connections import tf32_values
from nemo_rl_dsv4.refit import export_weights

HOPPER = get_profile("vllm-hopper")
NONE = dict.fromkeys(SWITCHES, False)
IDS = torch.randint(3, 160, (2, 150), generator=torch.Generator().manual_seed(6))


def make_model(config: Any, state: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = build_model(automodel_config(config), dtype=dtype, backend=CPU_BACKEND, seed=0)
    model.load_state_dict(state)
    return model


def recorded(block: Any, run: Any) -> dict[str, tuple[Any, Any]]:
    """First argument and output of the block's modules in one run."""
    calls: dict[str, tuple[Any, Any]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            calls[name] = (args[0] if args else next(iter(kwargs.values())), out)

        return hook

    names = ("attn_hc", "ffn_hc", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    modules = {name: getattr(block, name) for name in names} | {"block": block}
    handles = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in modules.items()]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return calls


def mixed(streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    post, comb = (t.as_subclass(torch.Tensor).double() for t in (post, comb))
    total = post[..., None] * out[:, :, None].double() + torch.einsum("bskj,bskd->bsjd", comb, streams.double())
    return total.to(torch.bfloat16)


def share(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the elements that differ."""
    return float((a != b).double().mean())


def test_streams_are_mixed_in_float32_and_cast_once(config_once, training_once):
    model = make_model(config_once, training_once)
    install_alignment(model, HOPPER, {**NONE, "hc_mix_fp32": True})
    for block in list(model.model.layers.values())[:2]:
        calls = recorded(block, lambda: model(IDS))
        streams = calls["attn_hc"][0]
        after_attention = mixed(streams, *calls["attn_hc"][1][1:], calls["self_attn"][1][0])
        assert share(calls["ffn_hc"][0], after_attention) < 2e-3
        after_experts = mixed(calls["ffn_hc"][0], *calls["ffn_hc"][1][1:], calls["mlp"][1])
        assert share(calls["block"][1], after_experts) < 2e-3
    untouched = make_model(config_once, training_once)
    first = next(iter(untouched.model.layers.values()))
    calls = recorded(first, lambda: untouched(IDS))
    wanted = mixed(calls["attn_hc"][0], *calls["attn_hc"][1][1:], calls["self_attn"][1][0])
    assert share(calls["ffn_hc"][0], wanted) > 0.05  # AutoModel as it is


@pytest.fixture(params=[False, True], ids=["float32", "tensor cores"])
def products(request, monkeypatch):
    """The path of products that GPUs take, with the CPU's arithmetic, and the one of CPUs."""
    if request.param:
        for module in (seams_streams, numerics_products):
            monkeypatch.setattr(module, "on_tensor_cores", lambda x: True)


def test_coefficients_come_from_tf32_weights_and_the_first_from_their_sum(config_once, training_once, products):
    aligned, plain = make_model(config_once, training_once), make_model(config_once, training_once)
    install_alignment(aligned, HOPPER, {**NONE, "hc_tf32": True})
    blocks, originals = list(aligned.model.layers.values()), list(plain.model.layers.values())
    for number, name in ((0, "attn_hc"), (0, "ffn_hc"), (1, "attn_hc")):
        streams, found = recorded(blocks[number], lambda: aligned(IDS))[name]
        mixer = getattr(originals[number], name)
        before = [t.clone() for t in mixer(streams)]
        fn = mixer.fn.data
        if (number, name) == (0, "attn_hc"):
            parts = list(fn.chunk(4, dim=-1))
            mixer.fn.data = torch.cat([tf32_values(sum(parts)), *(p * 0 for p in parts[1:])], -1)
        else:
            mixer.fn.data = tf32_values(fn)
        for a, b, c in zip(found, mixer(streams), before, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert float((a - b).abs().max()) < 0.2 * float((b - c).abs().max())
        mixer.fn.data = fn
    assert all("fn" not in block.attn_hc.__dict__ for block in blocks)


def test_norms_use_the_mean_square_before_the_cast(config_once, training_once):
    model = make_model(config_once, training_once)
    install_alignment(model, HOPPER, {**NONE, "hc_norm_fp32": True})
    block = list(model.model.layers.values())[1]
    calls = recorded(block, lambda: model(IDS))
    for mixer, norm in (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm")):
        streams, (pre, _, _) = calls[mixer]
        total = (pre.as_subclass(torch.Tensor).double()[..., None] * streams.double()).sum(2)
        collapsed, found = calls[norm]
        assert share(collapsed, total.bfloat16()) < 2e-3
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + getattr(block, norm).eps)
        wanted = (collapsed.double() * scale * getattr(block, norm).weight.double()).bfloat16()
        assert share(found, wanted) < 2e-3


@pytest.mark.parametrize("switches", [("hc_mix_fp32",), ("hc_mix_fp32", "hc_tf32", "hc_norm_fp32")])
def test_gradients_are_those_of_the_float32_model(config_once, training_once, switches, products):
    """Against a float32 model: about as near as AutoModel's own BF16 gradients are; the rest is experts that flip."""

    def gradients(dtype: torch.dtype, on: tuple[str, ...]) -> dict[str, torch.Tensor]:
        model = make_model(config_once, training_once, dtype)
        install_alignment(model, HOPPER, {**NONE, **dict.fromkeys(on, True)})
        torch.nn.functional.cross_entropy(
            model(IDS).logits[:, :-1].float().flatten(0, 1), IDS[:, 1:].flatten()
        ).backward()
        return {n: p.grad.double() for n, p in model.named_parameters() if "_hc" in n or "layernorm" in n}

    exact, own, aligned = (
        gradients(torch.float32, ()),
        gradients(torch.bfloat16, ()),
        gradients(torch.bfloat16, switches),
    )
    assert exact.keys() == aligned.keys() and len(exact) > 20

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - g).norm() / g.norm()) for n, g in exact.items()) / len(exact)

    assert error(aligned) < 1.5 * error(own), (error(aligned), error(own))


def test_hidden_states_after_the_first_layer_are_the_engines(config_once, training_once):
    """Two implementations that share only `numerics`: nearly every BF16 value is equal.

    The reference engine in BF16 used to rotate by frequencies that a cast of the model had rounded to BF16: 98 % of the
    values were others then.
    """
    stored = {name: value.clone() for name, value in make_model(config_once, training_once).state_dict().items()}
    engine = ReferenceEngine(config_once, HOPPER, dtype=torch.bfloat16)
    engine.update_weights(export_weights(stored, "vllm-hopper", unquantized=torch.bfloat16))
    different = {}
    for name, off in (("aligned", ()), ("without", ("hc_mix_fp32", "hc_tf32", "hc_norm_fp32"))):
        model = make_model(config_once, stored)
        install_numerics(model, HOPPER, dict.fromkeys(SITE_GROUPS, True), dict.fromkeys(off, False))
        left = recorded_outputs(engine.model.model.layers[0], lambda: engine.score(IDS))
        right = recorded_outputs(model.model.layers["0"], lambda m=model: m(IDS))
        different[name] = share(left, right)
    assert different["aligned"] < 2e-3 and different["without"] > 0.1, different


def recorded_outputs(layer: Any, run: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda m, a, out: found.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        run()
    handle.remove()
    return torch.cat(found)
