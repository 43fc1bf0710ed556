"""`benchmarks/random_model.py`: the checkpoint of the random-weight study."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["random_model.py", *words])
    return guarded(importlib.import_module("random_model").main)


def test_it_is_a_whole_checkpoint_with_wide_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    small = {**importlib.import_module("vllm_refit").CONFIG, "n_routed_experts": 6, "vocab_size": 256}
    monkeypatch.setattr(importlib.import_module("random_model"), "CONFIG", small)
    assert run(monkeypatch, str(folder), "--hidden-size", "128", "--device", "cpu") == 0
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 128
    checked = check_checkpoint(folder)
    assert not checked.problems, checked.problems[:3]
    checkpoint = ReleaseCheckpoint(folder)

    def value(name: str) -> torch.Tensor:
        return checkpoint.decode(name, *checkpoint.stored(name), torch.float32)

    assert float(value("head.weight").std()) == pytest.approx(0.1, rel=0.02)
    assert float(value("layers.1.attn.wq_b.weight").std()) == pytest.approx(2 * 0.02, rel=0.05)  # drawn with 0.02
    assert float(value("layers.1.attn.attn_sink").std()) == pytest.approx(1, rel=0.3)
    assert float(value("layers.1.ffn.gate.bias").std()) == pytest.approx(0.05, rel=0.7)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--hidden-size", "200"), "--hidden-size is 200; wanted a multiple of 128"),
        (("--device", "cuda"), "--device is cuda, and torch sees no GPU here; wanted cpu"),
        ((), "holds a checkpoint already; give another folder"),
    ],
)
def test_what_it_cannot_write_is_said_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    wanted: str,
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, str(tmp_path), *words) == 2
    assert wanted in capsys.readouterr().err
