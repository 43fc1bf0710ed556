"""The benchmark that looks for faults of an engine's kernels for small batches: its arithmetic, without an engine."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "benchmarks" / "vllm_batches.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("vllm_batches", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_are_sorted_by_what_ran_beside(benchmark) -> None:
    lengths = [1, 2, 4]
    decoded = [[-1.0], [-1.0, -2.0], [-1.0, -2.0, -7.0, float("nan")]]
    prefilled = [[-1.0], [-1.5, -2.0], [-1.0, -1.0, -2.0, -2.0]]
    table = benchmark.by_batch_size(lengths, decoded, prefilled)
    assert table[3] == {"tokens": 3, "nan": 0, "mean": pytest.approx(0.5 / 3), "largest": 0.5}
    assert table[2]["mean"] == 0.5
    assert table[1] == {"tokens": 2, "nan": 1, "mean": 5.0, "largest": 5.0}


def test_large_batches_share_lines(benchmark) -> None:
    table = benchmark.by_batch_size(
        [1] * 9 + [2] * 20, [[0.0]] * 9 + [[0.0, 0.0]] * 20, [[0.0]] * 9 + [[0.0, 0.0]] * 20
    )
    assert {size: row["tokens"] for size, row in table.items()} == {32: 49}
