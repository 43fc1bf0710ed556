"""Position-weighted sums of many byte ranges of one buffer, in one launch.

Reference: ``nemo_rl_dsv4.refit.checksum``: for the little-endian int32 words w_i of a range, sum of w_i * (2 i + 1) in
64 bits, two's complement.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 8192  # of a program


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _word_sums_kernel(words_ptr, which_ptr, table_ptr, sums_ptr, ranges, WORDS: tl.constexpr):
    program = tl.program_id(0)
    which = tl.load(which_ptr + program)
    first = tl.load(table_ptr + which)  # word of the buffer where the range starts
    count = tl.load(table_ptr + ranges + which)  # words of the range
    before = tl.load(table_ptr + 2 * ranges + which)  # programs of the ranges before it
    lane = (program - before) * WORDS + tl.arange(0, WORDS)
    inside = lane < count
    word = tl.load(words_ptr + first + lane, mask=inside, other=0).to(tl.int64)
    tl.atomic_add(sums_ptr + which, tl.reduce(word * (lane * 2 + 1), 0, _add))


def word_sums(buffer: Tensor, starts: list[int], counts: list[int]) -> Tensor:
    """int64 [ranges] on the buffer's device; the host does not wait for it.

    buffer: int32 [words], contiguous. starts, counts: first word and number of words of each range.
    """
    ranges, programs = len(starts), [-(-count // _WORDS) for count in counts]
    before = list(itertools.accumulate(programs, initial=0))
    sums = torch.zeros(ranges, dtype=torch.int64, device=buffer.device)
    if before[-1]:
        table = torch.tensor([starts, counts, before[:-1], programs], pin_memory=buffer.is_cuda)
        table = table.to(buffer.device, non_blocking=True)
        which = torch.repeat_interleave(table[3], output_size=before[-1])
        _word_sums_kernel[(before[-1],)](buffer, which, table, sums, ranges, WORDS=_WORDS, num_warps=8)
    return sums
