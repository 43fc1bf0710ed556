"""The policy benchmark runs on a CPU at a small size."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "policy.py"


@pytest.mark.slow
def test_every_mode_is_measured_against_bf16(monkeypatch, capsys):
    words = ["--device", "cpu", "--layers", "2", "--tokens", "32", "--repeats", "1", "--warm", "1", "--json"]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(BENCHMARK))["main"]() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    modes = found["modes"]
    assert modes["bf16"]["over_bf16"] == 1.0
    assert all(modes[mode]["ms"] > 0 for mode in ("bf16", "qat", "fp8"))
    assert modes["qat"]["codes_gb"] == modes["fp8"]["codes_gb"] > modes["bf16"]["codes_gb"] == 0
    assert modes["fp8"]["values_gb"] == 0 < modes["qat"]["values_gb"]
