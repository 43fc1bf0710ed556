"""The fused kernels on a real GPU: every profile, dtype and adversarial input, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "numerics.py"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_have_the_bits_of_the_reference() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
