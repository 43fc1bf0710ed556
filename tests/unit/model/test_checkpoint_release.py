"""The released format: written and read to the byte, readable by AutoModel, every damage named before loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.release_checkpoint import (
    ReleaseCheckpoint,
    read_release_checkpoint,
    write_release_checkpoint,
)
from nemo_rl_dsv4.model.stored_weight import FP4_SPEC, FP8_SPEC, decode_weight
from nemo_rl_dsv4.numerics import fake_quant

State = dict[str, torch.Tensor]
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, training_once: State, config_once: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("written") / "release"
    write_release_checkpoint(training_once, config_once, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """A checkpoint of its own for a test that damages it."""
    return Path(shutil.copytree(written, tmp_path / "release"))


def edit(folder: Path, change: Callable[[State], Any]) -> None:
    """Change the stored tensors, keeping the index in step."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_values_are_those_of_fake_quantization(folder: Path, random_official: State) -> None:
    checkpoint = ReleaseCheckpoint(folder)
    assert list(checkpoint) == list(random_official)
    for name, value in random_official.items():
        kind = tensor_kind(name)
        if kind in ("linear.weight", "expert.weight"):
            value = fake_quant(value, FP4_SPEC if kind == "expert.weight" else FP8_SPEC)
        elif kind == "bf16":
            value = value.to(torch.bfloat16).float()
        assert torch.equal(checkpoint.value(name), value), name


def test_stored_layout_is_the_released_one(folder: Path) -> None:
    """Case C017: scales of a saved checkpoint were in an engine's packed layout; case C032: expert layout guessed."""
    tensors = load_file(folder / SHARD)
    config = json.loads((folder / "config.json").read_text())
    wanted = {
        "layers.1.ffn.experts.7.w1.weight": (torch.int8, (192, 64)),
        "layers.1.ffn.experts.7.w1.scale": (torch.float8_e8m0fnu, (192, 4)),
        "layers.1.ffn.experts.7.w2.scale": (torch.float8_e8m0fnu, (128, 6)),
        "layers.1.attn.wq_b.weight": (torch.float8_e4m3fn, (320, 64)),
        "layers.1.attn.wq_b.scale": (torch.float8_e8m0fnu, (3, 1)),
        "layers.2.attn.indexer.weights_proj.weight": (torch.bfloat16, (4, 128)),
        "layers.2.attn.attn_sink": (torch.float32, (4,)),
        "layers.0.ffn.gate.tid2eid": (torch.int64, (160, 2)),
    }
    assert {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in wanted} == wanted
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize("expert_format", ["fp4", "fp8"])
def test_reading_and_writing_again_is_the_identity(
    expert_format: Any, tmp_path: Path, training_state: State, tiny_config: dict[str, Any]
) -> None:
    """A fifth of FP4 groups round down to half the maximum; requantizing those halves their scale."""
    write_release_checkpoint(training_state, tiny_config, tmp_path / "a", expert_format=expert_format)
    state = read_release_checkpoint(tmp_path / "a")
    assert set(state) == set(training_state)
    assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in training_state.items()}
    write_release_checkpoint(state, tiny_config, tmp_path / "b", expert_format=expert_format)
    assert (tmp_path / "a" / SHARD).read_bytes() == (tmp_path / "b" / SHARD).read_bytes()


@pytest.mark.parametrize("expert_format", ["fp4", "fp8"])
def test_automodel_reads_the_same_weights(
    expert_format: Any, tmp_path: Path, training_state: State, tiny_config: dict[str, Any]
) -> None:
    """AutoModel's own adapter, which decodes FP4 and FP8 by other code, agrees on every tensor."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM

    from nemo_rl_dsv4.model.checkpoint_format import automodel_config

    write_release_checkpoint(training_state, tiny_config, tmp_path / "a", expert_format=expert_format)
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        enable_hf_state_dict_adapter=True,
    )
    model = DeepseekV4ForCausalLM(automodel_config(tiny_config), backend=backend)
    theirs = model.state_dict_adapter.from_hf(load_file(tmp_path / "a" / SHARD))
    ours = read_release_checkpoint(tmp_path / "a")
    assert set(theirs) == set(ours)
    for key, value in ours.items():
        assert torch.equal(theirs[key].to(value.dtype), value), key


def test_shards_are_bounded_and_indexed(tmp_path: Path, training_state: State, tiny_config: dict[str, Any]) -> None:
    write_release_checkpoint(training_state, tiny_config, tmp_path / "a", max_shard_bytes=500_000)
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    sizes = [sum(t.numel() * t.element_size() for t in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= 500_000
    assert index["metadata"]["total_size"] == sum(sizes)
    write_release_checkpoint(training_state, tiny_config, tmp_path / "b")
    whole = read_release_checkpoint(tmp_path / "b")
    for key, value in read_release_checkpoint(tmp_path / "a").items():
        assert torch.equal(value, whole[key]), key


def test_bfloat16_keeps_quantized_values_and_fp32_tensors(folder: Path) -> None:
    whole, half = read_release_checkpoint(folder), read_release_checkpoint(folder, dtype=torch.bfloat16)
    for key, value in half.items():
        assert torch.equal(value.to(whole[key].dtype), whole[key]), key
    assert half["model.layers.2.self_attn.sinks_param.weight"].dtype == torch.float32
    assert half["model.layers.2.mlp.experts.down_projs"].dtype == torch.bfloat16


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("as_float", [True, False])
def test_other_scale_names_and_dtypes_are_read(folder: Path, suffix: str, as_float: bool) -> None:
    """Cases C006 and C029: an unknown scale suffix meant scale 1, 3361 times too large; bytes were read as numbers."""
    before = read_release_checkpoint(folder)

    def rename(tensors: State) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            scale = tensors.pop(name)
            scale = scale.float() if as_float else scale.view(torch.uint8)
            tensors[f"{name.removesuffix('scale')}{suffix}"] = scale

    edit(folder, rename)
    for key, value in read_release_checkpoint(folder).items():
        assert torch.equal(value, before[key]), key


def test_mtp_tensors_are_dropped_and_told_apart(folder: Path) -> None:
    """Cases C028 and C031: unscaled FP8 `mtp.0.e_proj` and the drafter of Flash-0731."""
    before = read_release_checkpoint(folder)
    edit(folder, lambda t: t.update({"mtp.0.e_proj.weight": torch.ones(128, 128).to(torch.float8_e4m3fn)}))
    checkpoint = ReleaseCheckpoint(folder)
    assert (checkpoint.mtp, checkpoint.dropped) == ("drafter", 1)
    assert set(read_release_checkpoint(folder)) == set(before)
    edit(folder, lambda t: t.update({f"mtp.0.{n}norm.weight": torch.ones(128) for n in "eh"}))
    assert (ReleaseCheckpoint(folder).mtp, ReleaseCheckpoint(folder).dropped) == ("next_token", 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(UserError, match="num_nextn_predict_layers is 1"):
        read_release_checkpoint(folder)
    assert set(read_release_checkpoint(folder, config_overrides={"num_nextn_predict_layers": 0})) == set(before)


def test_unscaled_fp8_is_read_only_for_listed_names(folder: Path) -> None:
    """Case C028: FP8 without a scale passed through as FP8."""
    name = "layers.1.attn.wq_a.weight"
    edit(folder, lambda tensors: tensors.pop("layers.1.attn.wq_a.scale"))
    codes = load_file(folder / SHARD)[name]
    with pytest.raises(UserError, match=r"layers\.1\.attn\.wq_a\.weight' is FP8 without a scale"):
        ReleaseCheckpoint(folder)
    assert torch.equal(ReleaseCheckpoint(folder, unscaled_fp8=[name]).value(name), codes.float())


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.float() if tensor.dtype == torch.float8_e8m0fnu else tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


WQ_A, EXPERT = "layers.1.attn.wq_a", "layers.1.ffn.experts.0.w1"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("layers.3.attn_norm.weight"), "tensor 'layers.3.attn_norm.weight' missing"),
        (lambda t: t.update({"layers.3.attn.q_bias": torch.ones(2)}), "tensor 'layers.3.attn.q_bias' unexpected"),
        (lambda t: t.update({"layers.5.attn_norm.weight": torch.ones(128)}), "'layers.5.attn_norm.weight' unexpected"),
        (lambda t: t.update({"head.scale": torch.ones(2, 1)}), "'head.scale' belongs to no quantized weight"),
        (lambda t: t.update({f"{WQ_A}.weight_scale": t[f"{WQ_A}.scale"].clone()}), "wq_a.weight' has two scales"),
        (lambda t: t.pop(f"{EXPERT}.scale"), r"experts\.0\.w1\.weight' is FP4 without a scale"),
        (replaced(f"{WQ_A}.weight", lambda w: w[:, :64].clone()), r"wq_a\.weight' is \[64, 64\]; .* \[64, 128\]"),
        (replaced(f"{EXPERT}.weight", lambda w: w[:, :32].clone()), r"w1\.weight' is \[192, 32\]; .* \[192, 64\]"),
        (replaced("norm.weight", lambda w: w.to(torch.int32)), r"'norm\.weight' is torch\.int32"),
        (replaced(f"{WQ_A}.weight", lambda w: w.view(torch.int8)), r"wq_a\.weight' is torch\.int8"),
        (replaced("head.weight", lambda w: w.to(torch.float8_e4m3fn)), r"'head\.weight' is torch\.float8_e4m3fn"),
        (replaced("layers.0.ffn.gate.tid2eid", lambda w: w.float()), r"tid2eid' is torch\.float32"),
        (
            replaced(f"{WQ_A}.scale", lambda s: s.float().repeat(1, 2)),
            r"wq_a\.scale' is .* \[1, 2\]; wanted .* \[1, 1\]",
        ),
        (replaced(f"{EXPERT}.scale", lambda s: s[:2, :2].clone()), r"w1\.scale' is .* \[2, 2\]; wanted .* \[192, 4\]"),
        (replaced(f"{WQ_A}.scale", first(float("nan"))), r"wq_a\.scale\[0, 0\] is nan"),
        (replaced(f"{WQ_A}.scale", first(0.0)), r"wq_a\.scale\[0, 0\] is 0\.0"),
        (replaced(f"{WQ_A}.scale", first(-1.0)), r"wq_a\.scale\[0, 0\] is -1\.0"),
        (replaced(f"{EXPERT}.scale", first(0.75)), r"w1\.scale\[0, 0\] is 0\.75; wanted a power of two"),
        (
            lambda t: t[f"{EXPERT}.scale"].view(torch.uint8).fill_(255),
            r"experts\.0\.w1\.scale\[0, 0\] is nan",
        ),
        (lambda t: t[f"{WQ_A}.weight"].view(torch.uint8)[3].fill_(0xFF), r"wq_a\.weight\[3, 0\] is NaN \(code 0xff\)"),
        (replaced("layers.2.attn.attn_sink", first(float("inf"))), r"attn_sink\[0\] is inf"),
        (replaced("layers.0.ffn.gate.tid2eid", first(8)), r"tid2eid: expert ids run from 0 to 8; wanted 0 to 7"),
        (lambda t: t["layers.0.ffn.gate.tid2eid"].zero_(), r"tid2eid: all 320 expert ids are zero"),
        (
            lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)],
            r"none of the \d+ DeepSeek-V4 tensors is here \(found 'model\.embed\.weight'\)",
        ),
    ],
)
def test_damaged_tensors_are_named(folder: Path, damage: Callable[[State], Any], message: str) -> None:
    """Cases C027 to C032: packed FP4 or FP8 without scale, foreign names, wrong layouts loaded as numbers."""
    edit(folder, damage)
    with pytest.raises(UserError, match=message) as error:
        read_release_checkpoint(folder)
    assert str(folder) in str(error.value)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (SHARD, lambda b: b[:-1000], r"tensor '[a-z_.\d]+' ends at byte \d+ of \d+; the file is truncated"),
        (SHARD, lambda b: b[:500], "no safetensors header in its 500 bytes"),
        (SHARD, lambda b: b"", "no safetensors header in its 0 bytes"),
        (SHARD, lambda b: b[:8] + b"?" + b[9:], "header is not JSON"),
        (SHARD, lambda b: b"\xff" * 8 + b[8:], "no safetensors header"),
        (SHARD, lambda b: b.replace(b'"F8_E4M3"', b'"F8_E5M2"', 1), "has dtype 'F8_E5M2'"),
        (SHARD, lambda b: b.replace(b'"shape":[160,128]', b'"shape":[160,129]', 1), r"\[160, 129\] takes \d+"),
        (SHARD, lambda b: b + b"x", "but its tensors end at"),
        ("config.json", lambda b: b[:-20], "config.json: cannot be read as a model configuration"),
        ("config.json", lambda b: b"[]", "config.json: holds a list"),
        (
            "config.json",
            lambda b: b.replace(b'"vocab_size": 160', b'"vocab_size": 161'),
            r"config.json wants \[161, ",
        ),
        ("model.safetensors.index.json", lambda b: b"{}", "cannot be read as an index"),
        (
            "model.safetensors.index.json",
            lambda b: b.replace(SHARD.encode(), b"../w.safetensors", 1),
            "names the shard",
        ),
        (
            "model.safetensors.index.json",
            lambda b: b.replace(b'"weight_map": {', b'"weight_map": {"a.b": "%s",' % SHARD.encode()),
            "tensor 'a.b' missing; model.safetensors.index.json lists it",
        ),
        (
            "model.safetensors.index.json",
            lambda b: b.replace(b'"embed.weight"', b'"embed.bias"'),
            "tensor 'embed.weight' unexpected",
        ),
    ],
)
def test_damaged_files_are_named(folder: Path, file: str, change: Callable[[bytes], bytes], message: str) -> None:
    rewrite(folder / file, change)
    with pytest.raises(UserError, match=message) as error:
        read_release_checkpoint(folder)
    assert str(folder) in str(error.value) or file == "config.json"


@pytest.mark.parametrize("file", [SHARD, "config.json", "model.safetensors.index.json"])
def test_missing_files_are_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(UserError, match=str(folder)):
        read_release_checkpoint(folder)


def test_float_scales_need_a_config_that_says_so(folder: Path, tiny_config: dict[str, Any]) -> None:
    """Case C015: whether scales are powers of two follows scale_fmt, not the dtype they are stored in."""
    edit(folder, replaced(f"{WQ_A}.scale", first(0.75)))
    with pytest.raises(UserError, match="wanted a power of two"):
        read_release_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps({**tiny_config, "quantization_config": {"quant_method": "fp8"}}))
    value = read_release_checkpoint(folder)["model.layers.1.self_attn.wq_a.weight"]
    codes = load_file(folder / SHARD)[f"{WQ_A}.weight"]
    assert torch.equal(value, codes.float() * 0.75)


def test_packed_fp4_is_never_a_number() -> None:
    """Case C027: byte 0x97 was read as -105; low nibble first it holds 6 and -0.5."""
    packed = torch.full((1, 16), 0x97 - 256, dtype=torch.int8)
    scale = torch.full((1, 1), 2.0)
    value = decode_weight("layers.0.ffn.experts.0.w1.weight", packed, scale, torch.float32)
    assert value.tolist() == [[12.0, -1.0] * 16]


def test_nothing_half_written_is_left(tmp_path: Path, training_state: State, tiny_config: dict[str, Any]) -> None:
    training_state["lm_head.weight"][5, 3] = float("nan")
    with pytest.raises(UserError, match=r"head\.weight\[5, 3\] is nan"):
        write_release_checkpoint(training_state, tiny_config, tmp_path / "a", max_shard_bytes=500_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("lm_head.weight"), "tensor 'head.weight' missing"),
        (lambda state: state.update({"lm_head.weight": torch.ones(160, 64)}), r"'head\.weight' is \[160, 64\]"),
        (lambda state: state.update({"lm_head.bias": torch.ones(160)}), "'lm_head.bias' is not a"),
    ],
)
def test_incomplete_states_are_not_written(
    tmp_path: Path, training_state: State, tiny_config: dict[str, Any], change: Callable[[State], Any], message: str
) -> None:
    change(training_state)
    with pytest.raises(UserError, match=message):
        write_release_checkpoint(training_state, tiny_config, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_and_tokenizer(folder: Path, training_state: State, tiny_config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="exists already"):
        write_release_checkpoint(training_state, tiny_config, folder)
    tokenizer = folder.parent / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text("not ours")
    write_release_checkpoint(training_state, tiny_config, folder.parent / "b", tokenizer)
    assert (folder.parent / "b" / "tokenizer.json").read_text() == "{}"
    assert json.loads((folder.parent / "b" / "config.json").read_text())["hidden_size"] == 128
