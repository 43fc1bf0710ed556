"""Export: names, order, formats, and values equal to what QAT rounds to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import fused_group, tensor_kind
from nemo_rl_dsv4.model.stored_weight import decode_scale, decode_weight, scale_name
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, fake_quant, get_profile, quantize
from nemo_rl_dsv4.refit import export_tensor, export_weights

State = dict[str, torch.Tensor]
HOPPER = get_profile("vllm-hopper")


def test_stream_is_complete_ordered_and_rounds_like_qat(training_state: State, random_official: State) -> None:
    """Case C016: export and fake quantization had a scale setting each; case C047: scales are the raw ceil grid."""
    stream = list(export_weights(training_state, "vllm-hopper", unquantized=torch.float32))
    weights = [name for name, _ in stream if not name.endswith(".scale")]
    assert weights == list(random_official)
    for position, (name, tensor) in enumerate(stream):
        if name.endswith(".scale"):
            continue
        value, kind = random_official[name], tensor_kind(name)
        if kind in ("linear.weight", "expert.weight"):
            follower, scale = stream[position + 1]
            assert follower == scale_name(name)
            assert tensor.dtype == torch.float8_e4m3fn
            assert scale.dtype == torch.float32
            assert scale.shape == (-(-value.shape[0] // 128), -(-value.shape[1] // 128))
            assert bool((scale.view(torch.int32) & 0x7FFFFF == 0).all())
            sent = decode_weight(name, tensor, scale, torch.float32)
            assert torch.equal(sent, fake_quant(value, HOPPER.site(kind))), name
        else:
            assert torch.equal(tensor, value), name


def test_unquantized_tensors_keep_their_release_dtype(training_state: State) -> None:
    """Case C036: the head, the router, compressors and weights_proj stay BF16, sinks and hyper-connections FP32."""
    stream = dict(export_weights(training_state, "vllm-hopper"))
    dtypes = {
        "head.weight": torch.bfloat16,
        "layers.2.attn.compressor.wgate.weight": torch.bfloat16,
        "layers.2.attn.indexer.weights_proj.weight": torch.bfloat16,
        "layers.2.ffn.gate.weight": torch.bfloat16,
        "layers.2.ffn.gate.bias": torch.float32,
        "layers.2.attn.attn_sink": torch.float32,
        "layers.2.attn.compressor.ape": torch.float32,
        "layers.2.hc_ffn_fn": torch.float32,
        "layers.0.ffn.gate.tid2eid": torch.int64,
    }
    assert {name: stream[name].dtype for name in dtypes} == dtypes


def test_fused_partners_travel_together(training_state: State) -> None:
    names = [name for name, _ in export_weights(training_state, "vllm-hopper")]
    groups = [fused_group(name) for name in names]
    runs = [g for i, g in enumerate(groups) if i == 0 or groups[i - 1] != g]
    assert len(runs) == len(set(runs))
    assert groups.count("layers.3.attn.wkv+attn.wq_a") == 4


def test_grouped_experts_become_one_weight_and_one_scale_each() -> None:
    """Case C035: a fused expert stack had no path for block scales and ran with scale 1."""
    rows = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
    state = {"model.layers.1.mlp.experts.gate_and_up_projs": rows.transpose(1, 2).contiguous()}
    state["model.layers.1.mlp.experts.gate_and_up_projs"][2] *= 1000
    stream = dict(export_weights(state, "vllm-hopper"))
    assert len(stream) == 4 * 2 * 2
    for expert in range(4):
        for w, half in (("w1", rows[expert, :128]), ("w3", rows[expert, 128:])):
            name = f"layers.1.ffn.experts.{expert}.{w}.weight"
            value = decode_weight(name, stream[name], stream[scale_name(name)], torch.float32)
            wanted = half * (1000 if expert == 2 else 1)
            assert (value - wanted).norm() / wanted.norm() < 0.03


def test_gate_and_up_never_share_a_block() -> None:
    """An expert width that is no multiple of 128 puts both halves in one block of the stack; the release has two."""
    gate, up = torch.full((192, 128), 1.0), torch.full((192, 128), 2.0**-20)
    state = {"model.layers.1.mlp.experts.gate_and_up_projs": torch.cat([gate, up]).T.unsqueeze(0).contiguous()}
    stream = dict(export_weights(state, "vllm-hopper"))
    name = "layers.1.ffn.experts.0.w3.weight"
    assert torch.equal(decode_weight(name, stream[name], stream[scale_name(name)], torch.float32), up)


def test_rounded_weight_returns_unchanged() -> None:
    """Case C014: an unchanged weight came back with 2.6 % error after each sync, because scales were amax/448 again."""
    value = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    once = quantize(value, HOPPER.site("linear.weight"))
    name = "layers.0.attn.wq_b.weight"
    sent = dict(export_tensor(name, dequantize(once, torch.float32), HOPPER))
    assert torch.equal(sent[name].view(torch.uint8), once.data.view(torch.uint8))
    assert torch.equal(sent[scale_name(name)], once.scale)


def test_profile_with_float_scales_gets_float_scales() -> None:
    """Case C013: power-of-two scales were sent to an engine that was configured for amax/448."""
    site = replace(HOPPER.row("linear.weight"), spec=QuantSpec("e4m3fn", (128, 128), "float32"))
    profile = replace(HOPPER, sites={**HOPPER.sites, "linear.weight": site})
    value, name = torch.full((128, 128), 3.0), "layers.0.attn.wq_a.weight"
    assert dict(export_tensor(name, value, profile))[scale_name(name)].item() == pytest.approx(3.0 / 448)
    with pytest.raises(UserError, match=r"layers\.0\.attn\.wq_a\.scale"):
        list(export_tensor(name, value, profile, scale_dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scale_bytes_are_decoded_not_read_as_numbers(dtype: torch.dtype) -> None:
    """Case C006: E8M0 byte 120 was copied into a float32 scale as 120.0 instead of 2^-7."""
    value, name = torch.full((128, 128), 448 * 2.0**-7), "layers.0.attn.wq_a.weight"
    scale = dict(export_tensor(name, value, HOPPER, scale_dtype=dtype))[scale_name(name)]
    assert scale.dtype == dtype
    assert scale.view(torch.uint8).item() == 120
    assert decode_scale(scale, name="s").item() == 0.0078125


def test_fnuz_profile_gets_the_bytes_of_a_checkpoint(training_state: State) -> None:
    """MI300X engines reinterpret e4m3fn codes themselves; sending fnuz codes would halve the weights twice."""
    hopper = list(export_weights(training_state, "vllm-hopper"))
    fnuz = list(export_weights(training_state, "vllm-rocm-gfx942"))
    for (name, a), (other, b) in zip(hopper, fnuz, strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_fp4_profile_packs_experts(random_official: State) -> None:
    name = "layers.1.ffn.experts.3.w2.weight"
    value, profile = random_official[name], get_profile("deepseek-reference")
    sent = dict(export_tensor(name, value, profile))
    assert sent[name].dtype == torch.int8
    assert sent[name].shape == (128, 96)
    assert sent[scale_name(name)].shape == (128, 6)
    decoded = decode_weight(name, sent[name], sent[scale_name(name)], torch.float32)
    assert torch.equal(decoded, fake_quant(value, profile.site("expert.weight")))


def test_bf16_profile_sends_bf16(training_state: State) -> None:
    stream = list(export_weights(training_state, "bf16"))
    assert not [name for name, _ in stream if name.endswith(".scale")]
    assert {tensor.dtype for _, tensor in stream} == {torch.bfloat16, torch.float32, torch.int64}


@pytest.mark.parametrize(
    ("key", "index", "message"),
    [
        ("model.layers.1.self_attn.wq_a.weight", (3, 5), r"layers\.1\.attn\.wq_a\.weight\[3, 5\] is nan"),
        ("model.layers.1.mlp.experts.gate_and_up_projs", (6, 7, 200), r"experts\.6\.w3\.weight\[8, 7\] is nan"),
        ("model.norm.weight", (9,), r"norm\.weight\[9\] is nan"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (2,), r"layers\.1\.ffn\.gate\.bias\[2\] is nan"),
    ],
)
def test_nan_names_tensor_and_index(training_state: State, key: str, index: tuple[int, ...], message: str) -> None:
    training_state[key][index] = float("nan")
    with pytest.raises(UserError, match=message):
        list(export_weights(training_state, "vllm-hopper"))


def test_zero_hash_table_is_refused(training_state: State) -> None:
    """Case C052: a frozen routing table was synchronised as zeros and the rollout became another model."""
    training_state["model.layers.0.mlp.gate.tid2eid"].zero_()
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.gate\.tid2eid.*all 320 expert ids are zero"):
        list(export_weights(training_state, "vllm-hopper"))


def test_unknown_key_and_scale_dtype_are_refused(training_state: State) -> None:
    with pytest.raises(UserError, match=r"scale_dtype is torch\.float16"):
        list(export_weights(training_state, "vllm-hopper", scale_dtype=torch.float16))
    with pytest.raises(UserError, match=r"'model\.layers\.0\.self_attn\.extra\.weight'"):
        training_state["model.layers.0.self_attn.extra.weight"] = torch.ones(2, 2)
        list(export_weights(training_state, "vllm-hopper"))


@pytest.fixture
def one_rank_mesh(tmp_path: Path) -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_weights_are_gathered(training_state: State, one_rank_mesh: dist.DeviceMesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = {
        key: distribute_tensor(value, one_rank_mesh, [Shard(0)]) if value.is_floating_point() else value
        for key, value in training_state.items()
    }
    pairs = zip(export_weights(training_state, HOPPER), export_weights(sharded, HOPPER), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_codes_of_training_are_sent_as_they_are(
    tiny_config, training_state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward pass and refit once quantized each on its own: twice the work, and two chances to differ."""
    from nemo_rl_dsv4.model import weight_rounding
    from nemo_rl_dsv4.model.build import build_model
    from nemo_rl_dsv4.model.checkpoint_format import automodel_config
    from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant
    from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, stored_codes
    from nemo_rl_dsv4.refit import encode

    model = build_model(automodel_config(tiny_config), routing_weight_after_down=True, seed=0)
    model.load_state_dict(training_state)
    install_fake_quant(model, HOPPER, dict.fromkeys(SWITCHES, True))
    quantizations = []
    for module in (weight_rounding, encode):
        monkeypatch.setattr(
            module, "quantize", lambda x, spec, **kw: quantizations.append(x.shape) or quantize(x, spec, **kw)
        )
    ids = torch.randint(3, 160, (1, 24), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(ids).logits.float().sum().backward()
    once = len(quantizations)
    assert once == 42 + 5 * 3
    refresh_quantized(model)
    stored, state = stored_codes(model), model.state_dict()
    sent = list(export_weights(state, "vllm-hopper", stored=stored))
    assert len(quantizations) == once
    apart = list(export_weights(training_state, "vllm-hopper"))
    assert len(quantizations) > once
    assert [name for name, _ in sent] == [name for name, _ in apart]
    for (name, found), (_, expected) in zip(sent, apart, strict=True):
        assert found.dtype == expected.dtype and found.is_contiguous(), name
        assert torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8)), name
    with pytest.raises(UserError, match="export with the profile of the training run"):
        list(export_weights(state, replace(HOPPER, sites=get_profile("deepseek-reference").sites), stored=stored))


def test_unchanged_blocks_go_out_with_the_checkpoints_bytes_whatever_training_stores() -> None:
    """Precedence: a block that the checkpoint's scale holds exactly takes it; a changed one takes training's scale."""
    from nemo_rl_dsv4.model.quantized_weights import StoredCodes
    from nemo_rl_dsv4.refit.encode import Encoder

    name, spec = "layers.0.attn.wq_a.weight", HOPPER.site("linear.weight")
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(-8, 9, (256, 256), generator=generator) / 16.0
    value[::128, ::128] = 0.5
    before = quantize(value, spec)
    source = 4 * before.scale  # larger than needed, as a checkpoint's may be
    value[3, 130] = before.scale[0, 1] * 2.0**-9  # training moved one weight to where the source scale has no code
    trained = quantize(value, spec)
    stored = {name: StoredCodes(trained.data, trained.scale, spec)}
    expected = source.clone()
    expected[0, 1] = trained.scale[0, 1]
    for found in (
        Encoder(HOPPER, source_scales={name: source}, stored=stored).encode(name, value),
        Encoder(HOPPER, source_scales={name: source}).encode(name, value),
    ):
        assert torch.equal(found.scale, expected)
        assert torch.equal(dequantize(Quantized(found.data, found.scale, spec, value.shape), torch.float32), value)
    alone = Encoder(HOPPER, stored=stored).encode(name, value)
    assert torch.equal(alone.scale, trained.scale)
