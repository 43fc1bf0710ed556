"""Conversions keep every value that the target can hold, say so where it cannot, and prove what they wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint import convert as convert_module
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.convert import convert_checkpoint
from nemo_rl_dsv4.model.checkpoint.summary import summarize
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint

from .conftest import INDEX, add_tensors, edit_config, edit_tensor
from .test_check import mtp_block

State = dict[str, torch.Tensor]
EXPERT = "layers.1.ffn.experts.0.w1"


def stored(folder: Path) -> State:
    return {name: value for shard in sorted(folder.glob("*.safetensors")) for name, value in load_file(shard).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def formats(folder: Path) -> set[tuple[str, str]]:
    return {(row.tensor_class, row.format) for row in summarize(check_checkpoint(folder)).formats}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory, sharded: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "fp8"
    report = convert_checkpoint(sharded, folder, "fp8", max_shard_bytes=900_000)
    assert report.written and not report.lossy and not report.errors
    assert report.actions["merged"] == 5 * 8 * 3
    return folder


def test_fp4_becomes_fp8_with_the_same_values(fp8: Path, sharded: Path) -> None:
    """Cases C026, C032 and C035: one scale for each 128x128 of each expert, no expert without its own."""
    wanted, found = read_release_checkpoint(sharded), read_release_checkpoint(fp8)
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), key
    assert ("routed experts", "FP8 128x128, scale E8M0 .scale") in formats(fp8)
    tensors = stored(fp8)
    assert tensors[f"{EXPERT}.weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{EXPERT}.scale"].shape == (2, 1)
    scales = [name for name in tensors if ".experts." in name and name.endswith(".scale")]
    assert len(scales) == 5 * 8 * 3
    config = json.loads((fp8 / "config.json").read_text())
    assert config["expert_dtype"] == "fp8" and config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert not list(fp8.parent.glob(".*.partial"))


def test_what_may_stay_comes_back_byte_for_byte(fp8: Path, sharded: Path, tmp_path: Path) -> None:
    before, after = stored(sharded), stored(fp8)
    for name, value in before.items():
        if ".experts." not in name:
            assert same_bytes(value, after[name]), name
    report = convert_checkpoint(fp8, tmp_path / "again", "fp8")
    assert set(report.actions) == {"copied"}
    again = stored(tmp_path / "again")
    assert all(same_bytes(value, again[name]) for name, value in after.items()) and set(again) == set(after)


def test_to_bf16_and_back(fp8: Path, sharded: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(sharded, tmp_path / "bf16", "bf16")
    assert report.written and not report.lossy
    wanted = read_release_checkpoint(sharded)
    for key, value in read_release_checkpoint(tmp_path / "bf16").items():
        assert torch.equal(value, wanted[key]), key
    assert {form for _, form in formats(tmp_path / "bf16")} == {"BF16", "F32", "I64"}
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    report = convert_checkpoint(tmp_path / "bf16", tmp_path / "back", "fp8")
    assert report.actions["quantized"] == sum("weight" in tensor_kind(name) for name in check_checkpoint(fp8).shapes)
    assert not report.errors  # values that came from FP8 blocks fit them again
    for key, value in read_release_checkpoint(tmp_path / "back").items():
        assert torch.equal(value, wanted[key]), key


def test_new_scales_have_the_layout_of_the_old_ones(folder: Path, tmp_path: Path) -> None:
    """FP8 export on the checkpoint's own scale layout: float32 `weight_scale_inv` stays float32 `weight_scale_inv`."""
    for name in list(json.loads((folder / INDEX).read_text())["weight_map"]):
        if name.endswith(("attn.wq_a.scale", "attn.wkv.scale")):
            old = edit_tensor(folder, name, lambda s: s)
            scale = load_file(old)[name].float()
            edit_tensor(folder, name, lambda _: None)
            add_tensors(folder, {name.replace(".scale", ".weight_scale_inv"): scale}, f"{name}.safetensors")
    edit_tensor(folder, "layers.2.attn.wo_b.scale", lambda _: None)
    edit_tensor(folder, "layers.2.attn.wo_b.weight", lambda w: w.view(torch.uint8).bitwise_and(0x77).to(torch.bfloat16))
    report = convert_checkpoint(folder, tmp_path / "out", "fp8")
    assert report.actions["quantized"] == 1
    found = stored(tmp_path / "out")
    assert found["layers.2.attn.wo_b.scale"].dtype == torch.float8_e8m0fnu  # most scales of this one are `.scale`
    assert found["layers.1.attn.wq_a.weight_scale_inv"].dtype == torch.float32
    checked = check_checkpoint(folder)
    checked.scales = {name: s for name, s in checked.scales.items() if s.name.endswith("weight_scale_inv")}
    layout = convert_module.scale_layout(checked)
    assert (layout.suffix, layout.dtype, layout.spec.scale) == (".weight_scale_inv", torch.float32, "ue8m0")


def spread(scale: torch.Tensor, octaves: int) -> torch.Tensor:
    raw = scale.view(torch.uint8).clone()
    raw[:128, :4] = 127
    raw[5, 2] = 127 - octaves
    return raw.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("octaves", [14, 15])
def test_range_of_fp4_scales(folder: Path, tmp_path: Path, octaves: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Case C026: exact up to 2^14 between scales of a tile; beyond, a loss is named and never silent."""

    def codes(weight: torch.Tensor) -> torch.Tensor:
        weight.fill_(0x11)  # 0.5
        weight[0, 0] = 0x77  # 6.0
        return weight

    edit_tensor(folder, f"{EXPERT}.weight", codes)
    edit_tensor(folder, f"{EXPERT}.scale", lambda s: spread(s, octaves))
    status = main(["convert", str(folder), str(tmp_path / "out"), "--to", "fp8", "--json"])
    report = json.loads(capsys.readouterr().out)
    if octaves == 14:
        assert status == 0 and report["written"] and report["lossy"] == {}
        wanted, found = (read_release_checkpoint(f) for f in (folder, tmp_path / "out"))
        assert all(torch.equal(value, found[key]) for key, value in wanted.items())
        return
    assert status == 1 and not report["written"] and list(report["lossy"]) == [f"{EXPERT}.weight"]
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "fp8", "--json", "--allow-lossy"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["actions"]["requantized"] == 1
    # 0.5 * 2^-15 vanishes beside 6: the tile's scale is 2^-6, its smallest step 2^-15.
    assert 0 < report["lossy"][f"{EXPERT}.weight"] < 1e-4
    assert main(["convert", str(folder), str(tmp_path / "bf16"), "--to", "bf16"]) == 0


def test_mtp_follows_the_config(folder: Path, tmp_path: Path) -> None:
    """Case C028: unscaled FP8 `e_proj` and `h_proj` become BF16; the whole block is left out when MTP is off."""
    add_tensors(folder, mtp_block(0, next_token=True))
    report = convert_checkpoint(folder, tmp_path / "off", "fp8")
    assert report.dropped == len(mtp_block(0, next_token=True)) - 24
    assert not any(name.startswith("mtp.") for name in stored(tmp_path / "off"))
    edit_config(folder, num_nextn_predict_layers=1)
    report = convert_checkpoint(folder, tmp_path / "on", "fp8")
    assert report.actions["upcast"] == 2
    found = stored(tmp_path / "on")
    assert found["mtp.0.e_proj.weight"].dtype == torch.bfloat16 and bool((found["mtp.0.e_proj.weight"] == 1).all())
    assert found["mtp.0.ffn.experts.3.w1.weight"].dtype == torch.float8_e4m3fn


def test_interrupted_work_is_continued(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert_checkpoint(sharded, tmp_path / "whole", "bf16", max_shard_bytes=2_000_000)
    real, calls = convert_module.convert_tensor, []

    def dies(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 200:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(convert_module, "convert_tensor", dies)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(sharded, tmp_path / "out", "bf16", max_shard_bytes=2_000_000)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    with pytest.raises(UserError, match="holds another, unfinished conversion; remove it"):
        convert_checkpoint(sharded, tmp_path / "out", "fp8")
    report = convert_checkpoint(sharded, tmp_path / "out", "bf16", max_shard_bytes=2_000_000)
    assert 0 < report.resumed < report.shards == whole.shards
    for shard in (tmp_path / "whole").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()
    assert (tmp_path / "whole" / "conversion.json").read_bytes() == (tmp_path / "out" / "conversion.json").read_bytes()


def test_output_that_does_not_read_back_is_not_delivered(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = convert_module.write_serving_notes

    def damage(folder: Path) -> Path:
        shard = sorted(folder.glob("*.safetensors"))[1]
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(content)
        return real(folder)

    monkeypatch.setattr(convert_module, "write_serving_notes", damage)
    with pytest.raises(UserError, match="does not read back as it was written"):
        convert_checkpoint(sharded, tmp_path / "out", "fp8", max_shard_bytes=900_000)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(convert_module, "write_serving_notes", real)
    report = convert_checkpoint(sharded, tmp_path / "out", "fp8", max_shard_bytes=900_000)
    assert report.written and report.resumed == report.shards - 1


def test_damage_existing_folders_and_other_files(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "chat.py").write_text("")
    convert_checkpoint(folder, tmp_path / "out", "fp8")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "encoding" / "chat.py").exists()
    assert "vllm serve" in (tmp_path / "out" / "SERVE.md").read_text()
    with pytest.raises(UserError, match="exists already"):
        convert_checkpoint(folder, tmp_path / "out", "fp8")
    edit_tensor(folder, f"{EXPERT}.scale", lambda _: None)
    with pytest.raises(UserError, match="FP4 without a scale"):
        convert_checkpoint(folder, tmp_path / "new", "fp8")
    assert not (tmp_path / "new").exists() and not (tmp_path / ".new.partial").exists()


def test_transformers_loads_the_bf16_form(sharded: Path, tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    """transformers renames the official tensors itself; its model then computes what ours does."""
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    from nemo_rl_dsv4.model.checkpoint_format import TRANSFORMERS, transformers_config

    convert_checkpoint(sharded, tmp_path / "bf16", "bf16")
    shutil.copy(sharded / "config.json", tmp_path / "old.json")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32, attn_implementation="eager")
    ours = DeepseekV4ForCausalLM(transformers_config(tiny_config))
    ours.load_state_dict(read_release_checkpoint(sharded, layout=TRANSFORMERS), strict=False)
    state = ours.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value.float(), state[key].float()), key
