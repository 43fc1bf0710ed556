"""Kernels that move and sum bytes, under Triton's interpreter."""

import pytest
import torch

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
