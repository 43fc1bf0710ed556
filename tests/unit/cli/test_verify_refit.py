"""`nemo-rl-dsv4 verify-refit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.model.release_checkpoint import write_release_checkpoint


@pytest.fixture
def folder(tmp_path: Path, training_once: dict[str, torch.Tensor], config_once: dict[str, Any]) -> Path:
    write_release_checkpoint(training_once, config_once, tmp_path / "release", expert_format="fp8")
    return tmp_path / "release"


def test_clean_checkpoint_has_no_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-refit", str(folder), "--json"]) == 0
    profiles = {report["profile"]: report for report in json.loads(capsys.readouterr().out)["profiles"]}
    rocm = {"vllm-rocm-gfx950", "vllm-rocm-gfx950-bf16", "vllm-rocm-gfx942"}
    assert set(profiles) == {"bf16", "vllm-hopper", "vllm-blackwell"} | rocm
    counts = profiles["vllm-hopper"]["classes"]["expert.weight"]
    assert counts == {"identical": 120, "recoded": 0, "renormalised": 0, "changed": 0}
    assert profiles["bf16"]["classes"]["expert.weight"]["recoded"] == 120


def test_finding_ends_with_1_and_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 experts cannot become FP4 without loss."""
    assert main(["verify-refit", str(folder), "--profile", "deepseek-reference"]) == 1
    shown = capsys.readouterr()
    assert "deepseek-reference: FINDINGS" in shown.out
    assert "layers.0.ffn.experts.0.w1.weight: values changed" in shown.out
    assert "and 115 more" in shown.out
    assert "comparing" in shown.err


def test_damaged_checkpoint_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["layers.1.attn.wq_b.weight"].view(torch.uint8)[3, 4] = 0x7F
    save_file(tensors, file)
    assert main(["verify-refit", str(folder), "--profile", "vllm-hopper"]) == 2
    assert "layers.1.attn.wq_b.weight[3, 4] is NaN" in capsys.readouterr().err
    assert main(["verify-refit", str(folder / "no")]) == 2
