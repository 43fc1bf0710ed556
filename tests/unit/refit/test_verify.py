"""Exporting unchanged weights must change nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.release_checkpoint import write_release_checkpoint
from nemo_rl_dsv4.refit import encode, verify_export

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, training_once: State, config_once: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_release_checkpoint(training_once, config_once, folder / "fp8", expert_format="fp8")
    write_release_checkpoint(training_once, config_once, folder / "fp4", expert_format="fp4")
    return folder


@pytest.fixture
def fp8_folder(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written / "fp8", tmp_path / "fp8"))


@pytest.fixture
def fp4_folder(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written / "fp4", tmp_path / "fp4"))


def edit(folder: Path, changes: dict[str, Any]) -> None:
    """Overwrite stored bytes: {tensor name: byte, or [bytes] along its last dim}."""
    file = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors[name].view(torch.uint8).copy_(torch.tensor(value, dtype=torch.uint8))
    save_file(tensors, file)


def test_fp8_checkpoint_is_exported_byte_for_byte(fp8_folder: Path, random_official: State) -> None:
    """Case C014: an unchanged weight moved at each sync."""
    report = verify_export(fp8_folder, "vllm-hopper")
    assert report.ok
    assert report.count("identical") == len(random_official)
    assert {kind: sum(counts.values()) for kind, counts in report.classes.items()} == Counter(
        tensor_kind(name) for name in random_official
    )


def test_fp4_experts_become_fp8_without_loss(fp4_folder: Path, random_official: State) -> None:
    experts = sum(".experts." in name for name in random_official)
    assert experts == 120
    report = verify_export(fp4_folder, "vllm-hopper")
    assert report.ok
    assert report.count("identical") == len(random_official) - experts
    assert report.classes["expert.weight"]["recoded"] == experts
    assert verify_export(fp4_folder, "deepseek-reference").count("identical") == len(random_official)


@pytest.mark.parametrize("profile", ["vllm-hopper", "vllm-blackwell", "vllm-rocm-gfx950", "vllm-rocm-gfx942"])
@pytest.mark.parametrize("code", [0x76, 0x38])
def test_scale_larger_than_needed_is_kept(fp8_folder: Path, code: int, profile: str, random_official: State) -> None:
    """Codes 224 and 1.0 leave the largest one unused: the export found a smaller scale for the same values."""
    edit(fp8_folder, {"layers.1.attn.wq_b.weight": code})
    report = verify_export(fp8_folder, profile)
    assert report.ok
    assert report.count("identical") == len(random_official)


def test_other_bytes_for_the_same_values_are_a_finding(fp8_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(fp8_folder, {"layers.1.attn.wq_b.weight": 0x76})
    monkeypatch.setattr(encode, "keep_source_scale", lambda quantized, value, source: quantized)
    report = verify_export(fp8_folder, "vllm-hopper")
    assert not report.ok
    assert report.findings == {"layers.1.attn.wq_b.weight": "same values under other codes and scales"}
    assert report.classes["linear.weight"]["renormalised"] == 1


@pytest.mark.parametrize(("octaves", "lossless"), [(14, True), (15, False)])
def test_fp4_scales_too_far_apart_are_a_finding(fp4_folder: Path, octaves: int, lossless: bool) -> None:
    """FP4 to FP8 is exact up to 2^14 between the scales of a 128x128 block; beyond, it lost the small ones silently."""
    name = "layers.1.ffn.experts.0.w1"
    scales = [127, 127 - octaves, 127 - octaves, 127 - octaves]
    edit(fp4_folder, {f"{name}.weight": 0x37, f"{name}.scale": scales})  # codes 6 and 1.5
    report = verify_export(fp4_folder, "vllm-hopper")
    assert report.ok == lossless
    assert list(report.changed) == ([] if lossless else [f"{name}.weight"])
    assert report.to_dict()["ok"] == lossless


@pytest.mark.parametrize("profile", ["vllm-hopper", "vllm-blackwell", "vllm-rocm-gfx950", "vllm-rocm-gfx942", "bf16"])
def test_training_weights_are_stable_once_exported(training_once: State, official_once: State, profile: str) -> None:
    report = verify_export(training_once, profile)
    assert report.ok
    assert report.count("identical") == len(official_once)
