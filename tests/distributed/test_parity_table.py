"""Four processes compute what one does: layouts of context and expert parallelism, packed rows and rounding too."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = ("dp2cp2ep4", "cp4ep4")
VARIANTS = ("packed", "qat-float64")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    """Errors by (layout, variant) of the benchmark at half its size; ranks find both files by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import half_parity
        import parity

        patch.setattr(parity, "run_rank", half_parity.run_rank)
        return {(sizes, variant): errors for sizes, variant, errors in parity.run(list(SIZES), list(VARIANTS))}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_four_processes_equal_one(table, sizes, variant):
    """Log-probabilities, loss, gradients, their norm and the update agree to float32; exported bytes are the same.

    `qat-float64` has one row a sequence and rounds; the order of additions is without effect in it, so that no FP8 code
    may differ.
    """
    found = table[sizes, variant]
    logprobs = 1e-7 if variant == "qat-float64" else 1e-5
    assert found["logprobs_max"] < logprobs and found["loss"] < 1e-6 and found["grad_norm"] < 1e-6, found
    assert found["gradient_max"] < 5e-5 and found["gradient_median"] < 5e-6 and found["update_max"] < 5e-5, found
    assert found["export_bytes_differing"] == 0 and found["export_bytes"] > 4e6, found
