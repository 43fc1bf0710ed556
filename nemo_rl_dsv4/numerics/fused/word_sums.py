"""Position-weighted sums of many byte ranges of one buffer, in one launch.

Reference: ``nemo_rl_dsv4.refit.checksum``: for the little-endian int32 words w_i of a range, sum of w_i * (2 i + 1) in
64 bits, two's complement.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 8192  # of a program


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _word_sums_kernel(words_ptr, table_ptr, sums_ptr, WORDS: tl.constexpr):
    program = tl.program_id(0)
    which = tl.load(table_ptr + program * 4)
    first = tl.load(table_ptr + program * 4 + 1)  # word of the buffer where the range starts
    skip = tl.load(table_ptr + program * 4 + 2)  # words of the range before this program's
    count = tl.load(table_ptr + program * 4 + 3)  # words of the range
    lane = skip + tl.arange(0, WORDS)
    inside = lane < count
    word = tl.load(words_ptr + first + lane, mask=inside, other=0).to(tl.int64)
    tl.atomic_add(sums_ptr + which, tl.reduce(word * (lane * 2 + 1), 0, _add))


def word_sums(buffer: Tensor, starts: list[int], counts: list[int]) -> Tensor:
    """int64 [ranges] on the buffer's device.

    buffer: int32 [words], contiguous. starts, counts: first word and number of words of each range.
    """
    first, length = torch.tensor(starts), torch.tensor(counts)
    programs = -(-length // _WORDS)
    which = torch.repeat_interleave(torch.arange(len(starts)), programs)
    number = torch.arange(len(which)) - (programs.cumsum(0) - programs)[which]  # of the program within its range
    sums = torch.zeros(len(starts), dtype=torch.int64, device=buffer.device)
    if len(which):
        table = torch.stack([which, first[which], number * _WORDS, length[which]], dim=1).to(buffer.device)
        _word_sums_kernel[(len(which),)](buffer, table, sums, WORDS=_WORDS, num_warps=8)
    return sums
