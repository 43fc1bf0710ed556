"""Four processes compute what one does: layouts of context and expert parallelism, packed rows too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_four_processes_equal_one():
    """Relative errors of loss, gradients, gradient norm, update and log-probabilities; exported bytes are the same."""
    command = [sys.executable, str(ROOT / "benchmarks" / "parity.py"), "--json", "--sizes", "dp2cp2ep4", "cp4ep4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, "--variants", "plain", "packed"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 4
    for found in lines:
        assert found["logprobs_max"] < 1e-4 and found["loss"] < 1e-4 and found["grad_norm"] < 1e-4, found
        assert found["gradient_max"] < 1e-3 and found["gradient_median"] < 1e-4, found
        assert found["export_bytes_differing"] == 0, found
