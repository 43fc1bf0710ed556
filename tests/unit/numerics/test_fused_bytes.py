"""Kernels that move and sum bytes, under Triton's interpreter."""

import pytest
import torch

from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.numerics.blockwise import Quantized, reference_dequantize, reference_quantize
from nemo_rl_dsv4.refit.checksum import bytes_checksum

from . import interpreted

FUSED = interpreted.load()


@pytest.mark.parametrize("shape", [(1, 128, 128), (2, 200, 300), (3, 1, 7)])
def test_transpose_turns_every_matrix(shape):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(FUSED["transpose"].transpose_bytes(x), x.transpose(1, 2).contiguous())


def test_word_sums_are_the_checksums_of_each_range():
    buffer = torch.randint(0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    buffer[40_001:40_016] = 0
    ranges = [(0, 40_001), (40_016, 64), (40_080, 0), (40_080, 59_840)]
    starts, counts = [start // 4 for start, _ in ranges], [-(-size // 4) for _, size in ranges]
    sums = FUSED["word_sums"].word_sums(buffer.view(torch.int32), starts, counts).tolist()
    assert [value % 2**64 for value in sums] == [bytes_checksum(buffer[s : s + n]) for s, n in ranges]


@pytest.mark.parametrize("fmt", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("scale", ["ue8m0", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_become_the_references_bytes_and_values(fmt, scale, dtype):
    """Rows of all sizes, a zero row, and a number of groups that fills no tile."""
    spec = QuantSpec(fmt, (1, 128), scale, amax_floor=1e-10)
    x = torch.randn(13, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 13)[:, None]
    x[4] = 0.0
    x = x.to(dtype)
    want = reference_quantize(x, spec)
    assert FUSED["group_bytes"].covers(x.shape, spec)
    data, scales = FUSED["group_bytes"].quantize_groups(x, spec)
    assert torch.equal(data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(scales, want.scale)
    values = FUSED["group_bytes"].dequantize_groups(data, scales, spec, dtype)
    expected = reference_dequantize(Quantized(data, scales, spec, x.shape), dtype)
    assert torch.equal(values, expected)
