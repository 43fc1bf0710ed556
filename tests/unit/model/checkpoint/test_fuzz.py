"""A slice of `benchmarks/fuzz_checkpoints.py`: damaged checkpoints are refused or loaded bit for bit."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[4] / "benchmarks" / "fuzz_checkpoints.py"


def test_damaged_checkpoints_are_refused_or_right(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fuzz_checkpoints", BENCHMARK)
    assert spec is not None and spec.loader is not None
    fuzzing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzzing)
    outcomes, failures = fuzzing.fuzz(210, 1, tmp_path)
    assert failures == []
    total = sum(outcomes.values(), Counter())
    assert total["refused"] > 120 and total["right"] > 5
    for kind in ("truncate", "extend", "change_offsets", "repeat_key", "lose_tensor", "move_files"):
        assert outcomes[kind]["right"] == 0, kind
