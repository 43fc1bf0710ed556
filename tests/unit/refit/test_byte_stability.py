"""An unchanged weight leaves as it came: once, twice, ten times, under every profile."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.model.stored_weight import decode_weight, is_quantized, scale_name
from nemo_rl_dsv4.numerics import PROFILES, Quantized, QuantSpec, dequantize, get_profile, quantize
from nemo_rl_dsv4.numerics.conversions import e4m3fn_to_fnuz
from nemo_rl_dsv4.refit import SourceScales, export_tensor, export_weights
from nemo_rl_dsv4.refit.source_scales import keep_source_scale

NAMES = ("layers.0.attn.wq_b.weight", "layers.1.ffn.experts.3.w2.weight")
OCP = ("vllm-hopper", "vllm-blackwell", "vllm-rocm-gfx950")


def random_release(name: str, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every magnitude under scales that are not the smallest: what another writer may have stored."""
    generator = torch.Generator().manual_seed(len(name))
    q = quantize(torch.randn(300, 448, generator=generator), spec)
    larger = torch.randint(0, 3, q.scale.shape, generator=generator)
    scale = torch.ldexp(q.scale, larger)
    values = dequantize(q, torch.float32)
    exact = quantize(values, spec)
    kept = keep_source_scale(exact, values, scale)
    data = kept.data.view(torch.int8) if spec.fmt == "e2m1" else kept.data
    return data, kept.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if profile.site("linear.weight")])
@pytest.mark.parametrize("name", NAMES)
def test_ten_round_trips_keep_every_byte(name: str, profile: str, dtype: torch.dtype) -> None:
    """Case C014. Quantizing dequantized weights anew kept values and halved the scale of one block in twenty."""
    site = get_profile(profile).site(tensor_kind(name))
    assert site is not None
    spec = site if site.fmt == "e2m1" else QuantSpec("e4m3fn", (128, 128), "ue8m0")
    data, scale = first = random_release(name, spec)
    anew = dict(export_tensor(name, decode_weight(name, data, scale, dtype), get_profile(profile)))
    assert not torch.equal(anew[scale_name(name)], scale), "the stored scales would be found without their help"
    for _ in range(10):
        value = decode_weight(name, data, scale, dtype)
        sent = dict(export_tensor(name, value, get_profile(profile), source_scale=scale))
        data, scale = sent[name], sent[scale_name(name)]
        assert torch.equal(data.view(torch.uint8), first[0].view(torch.uint8))
        assert torch.equal(scale, first[1])


@pytest.mark.parametrize("name", NAMES)
def test_ocp_engines_get_the_same_bytes_and_fnuz_the_same_values(name: str) -> None:
    value = torch.randn(300, 448, generator=torch.Generator().manual_seed(1))
    streams = {p: dict(export_tensor(name, value, get_profile(p))) for p in (*OCP, "vllm-rocm-gfx942")}
    first = streams[OCP[0]]
    for stream in streams.values():
        assert torch.equal(stream[name].view(torch.uint8), first[name].view(torch.uint8))
        assert torch.equal(stream[scale_name(name)], first[scale_name(name)])
    codes, scale = e4m3fn_to_fnuz(first[name], first[scale_name(name)])
    spec = QuantSpec("e4m3fnuz", (128, 128), "ue8m0", fnuz_max=224.0)
    assert torch.equal(
        dequantize(Quantized(codes, scale, spec, value.shape), torch.float32),
        decode_weight(name, first[name], first[scale_name(name)], torch.float32),
    )


def test_a_trained_block_gets_the_profiles_own_scale() -> None:
    """One changed element makes its block inexact under the source scale; its neighbours keep theirs."""
    name, profile = NAMES[0], get_profile("vllm-hopper")
    value = torch.full((256, 256), 3.0)
    source = torch.full((2, 2), 2.0**-4)
    value[5, 200] += 2.0**-12
    sent = dict(export_tensor(name, value, profile, source_scale=source))
    assert sent[scale_name(name)].tolist() == [[2.0**-4, 2.0**-7], [2.0**-4, 2.0**-4]]
    plain = dict(export_tensor(name, value, profile))
    values = [decode_weight(name, s[name], s[scale_name(name)], torch.float32) for s in (sent, plain)]
    assert torch.equal(*values)


def test_codes_of_training_keep_the_checkpoints_bytes_too() -> None:
    """QAT quantizes by the profile's rule: the same values as the checkpoint, in one block of twenty other bytes."""
    name, profile = NAMES[0], get_profile("vllm-hopper")
    data, scale = random_release(name, QuantSpec("e4m3fn", (128, 128), "ue8m0"))
    value = decode_weight(name, data, scale, torch.float32)
    value[0, 0] = value[0, 0] * 1.03  # one trained block
    training = quantize(value, QuantSpec("e4m3fn", (128, 128), "ue8m0"))
    assert not torch.equal(training.scale, scale)
    stored = {name: StoredCodes(training.data, training.scale, training.spec)}
    key = "model.layers.0.self_attn.wq_b.weight"
    sent = dict(export_weights({key: value}, profile, source_scales=SourceScales([(name, scale)]), stored=stored))
    plain = dict(export_weights({key: value}, profile, stored=stored))
    assert torch.equal(plain[name].view(torch.uint8), training.data.view(torch.uint8))
    values = [decode_weight(name, s[name], s[scale_name(name)], torch.float32) for s in (sent, plain)]
    assert torch.equal(*values)
    trained = torch.zeros(scale.shape, dtype=torch.bool)
    trained[0, 0] = True
    assert torch.equal(sent[scale_name(name)][~trained], scale[~trained])
    assert torch.equal(sent[name][128:].view(torch.uint8), data[128:].view(torch.uint8))


def test_a_scale_too_small_for_the_weights_is_not_kept() -> None:
    name, value = NAMES[0], torch.full((128, 128), 448.0)
    sent = dict(export_tensor(name, value, get_profile("vllm-hopper"), source_scale=torch.full((1, 1), 0.5)))
    assert sent[scale_name(name)].item() == 1.0
    assert is_quantized(sent[name].dtype)


def test_source_scales_are_kept_as_stored() -> None:
    stored = torch.full((2, 3), 120, dtype=torch.uint8)
    scales = SourceScales([(NAMES[0], stored)])
    assert len(scales) == 1
    assert torch.equal(scales[NAMES[0]], torch.full((2, 3), 2.0**-7))
