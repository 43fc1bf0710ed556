"""The profiles as data: sites, what NUMERICS.md says about them, printing and comparing."""

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics import PROFILES, SITES, QuantSpec, diff, fake_quant, get_profile, profile_of_device, quantize
from nemo_rl_dsv4.numerics.devices import profile_of_hardware

ACTIVATIONS = ("linear.input", "expert.input", "expert.hidden")


def test_every_profile_answers_for_every_site() -> None:
    assert set(PROFILES) == {
        "bf16",
        "vllm-hopper",
        "vllm-blackwell",
        "vllm-rocm-gfx950",
        "vllm-rocm-gfx950-bf16",
        "vllm-rocm-gfx942",
        "deepseek-reference",
    }
    for profile in PROFILES.values():
        assert [row["site"] for row in profile.rows()[: len(SITES)]] == list(SITES)
        assert all(profile.row(site).source for site in SITES)
    assert all(get_profile("bf16").site(site) is None for site in SITES)


def test_activation_scales_follow_the_engine_and_not_a_constant() -> None:
    """C010, C011, C013: power-of-two scales on NVIDIA, float scales equal to amax/448 on ROCm; the profile decides."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for site in ACTIVATIONS:
        hopper, rocm = get_profile("vllm-hopper").site(site), get_profile("vllm-rocm-gfx950").site(site)
        assert hopper is not None and rocm is not None
        assert (hopper.scale, rocm.scale) == ("ue8m0", "float32")
        assert (hopper.block, hopper.amax_floor, rocm.amax_floor) == ((1, 128), 1e-10, 1e-10)
        assert not torch.equal(fake_quant(x, hopper), fake_quant(x, rocm))


def test_bf16_weights_on_rocm_keep_the_fp8_cache_and_indexer() -> None:
    """The published BF16 mode on MI355X: products are not quantized, KV cache and indexer are as in the other modes."""
    fp8, bf16 = get_profile("vllm-rocm-gfx950"), get_profile("vllm-rocm-gfx950-bf16")
    kept = ("kv.swa", "kv.compressed", "indexer.q", "indexer.k")
    assert [name for name in SITES if bf16.site(name) is not None] == list(kept)
    assert all(bf16.row(name) == fp8.row(name) for name in kept) and bf16.alignment == fp8.alignment


def test_weights_are_the_same_everywhere_vllm_runs_and_have_no_floor() -> None:
    for name in ("vllm-hopper", "vllm-blackwell", "vllm-rocm-gfx950"):
        for site in ("linear.weight", "expert.weight"):
            spec = get_profile(name).site(site)
            assert spec is not None
            assert (spec.fmt, spec.block, spec.scale, spec.amax_floor) == ("e4m3fn", (128, 128), "ue8m0", 0.0)


def test_fnuz_profile_gives_the_values_of_the_ocp_one() -> None:
    """C056: one format a platform. With max 224 every value equals gfx950's, although the bytes differ."""
    x = torch.randn(4, 576, generator=torch.Generator().manual_seed(1)) * 3
    for site in SITES:
        ocp, fnuz = get_profile("vllm-rocm-gfx950").site(site), get_profile("vllm-rocm-gfx942").site(site)
        if ocp is None or fnuz is None:
            assert ocp is fnuz
            continue
        assert fnuz.fmt == "e4m3fnuz"
        assert torch.equal(fake_quant(x, ocp), fake_quant(x, fnuz))


def test_kv_sites_keep_the_rope_channels_and_floor_the_scale() -> None:
    for name in ("vllm-hopper", "vllm-blackwell"):
        swa, compressed = get_profile(name).site("kv.swa"), get_profile(name).site("kv.compressed")
        assert swa is not None and compressed is not None
        assert (swa.block, swa.keep_last, swa.amax_floor) == ((1, 64), 64, 1e-4)
        tiny = torch.full((1, 128), 1e-6)
        assert quantize(tiny, compressed).scale.item() == 2.0**-13
        assert quantize(tiny, swa).scale.item() == 2.0**-22


def test_deepseek_reference_quantizes_the_indexer_in_fp4_after_a_hadamard() -> None:
    profile = get_profile("deepseek-reference")
    spec = profile.site("indexer.q")
    assert spec == QuantSpec("e2m1", (1, 32), "ue8m0", amax_floor=6 * 2.0**-126) and profile.indexer_hadamard


def test_diff_names_what_parts_two_vendors_and_nothing_else() -> None:
    assert diff(get_profile("vllm-hopper"), get_profile("vllm-hopper")) == []
    found = diff(get_profile("vllm-hopper"), get_profile("vllm-blackwell"))
    assert {(row["site"], row["field"]) for row in found} == {
        ("linear.input", "rounding"),
        ("expert.input", "rounding"),
        ("hidden_bf16_steps", "format"),
        ("attention_probs_bf16", "format"),  # Blackwell's kernel raises its maximum late; no switch follows that
    }
    assert found[0]["vllm-hopper"] == "log2f" and found[0]["vllm-blackwell"] == "bits"


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(UserError, match="valid: bf16, vllm-hopper"):
        get_profile("hopper")
    with pytest.raises(UserError, match=r"valid: linear\.weight"):
        get_profile("bf16").site("linear.weights")
    for bad in (
        {"fmt": "e5m2"},
        {"scale": "pow2"},
        {"block": (0, 128)},
        {"scale_rounding": "ceil"},
        {"amax_floor": -1.0},
    ):
        with pytest.raises(ValueError, match=r"valid|wanted"):
            QuantSpec(**bad)


def test_auto_is_resolved_where_the_gpu_is() -> None:
    """C011, C012: capability decides on the worker; a driver without a GPU gets an error, never a Hopper guess."""
    with pytest.raises(UserError, match="'auto' is resolved on the worker"):
        get_profile("auto")
    with pytest.raises(UserError, match="no GPU at cpu"):
        profile_of_device("cpu")
    assert profile_of_hardware((9, 0)).name == "vllm-hopper"
    assert profile_of_hardware((10, 3)).name == "vllm-blackwell"
    assert profile_of_hardware((9, 5), "gfx950:sramecc+:xnack-").name == "vllm-rocm-gfx950"
    for capability, architecture in (((8, 0), ""), ((9, 0), "gfx1100")):
        with pytest.raises(UserError, match="no rollout profile for"):
            profile_of_hardware(capability, architecture)
