"""The benchmark runs on a CPU, and its three ways make the same bytes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest


def test_benchmark_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "refit.py"
    spec = importlib.util.spec_from_file_location("refit_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = ["--experts", "3", "--hidden", "256", "--width", "128", "--repeats", "1", "--bucket-gb", "0.0002", "--json"]
    assert module.main(small) == 0
    found = json.loads(capsys.readouterr().out)
    for way in found["ways"].values():
        assert way["equal"]
        assert 0.5 < way["moved_over_bf16"] < 0.501
    assert found["extrapolated"]["seconds"] > 0
