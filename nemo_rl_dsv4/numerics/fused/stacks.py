"""Stacks of weights in square blocks, read once in the order they lie in memory, written as codes in official order.

Reference: ``reference_quantize`` of the stack. A program takes a block of 128 x 128 as four interleaved sets of 32
rows, so that four codes of a column form a word without leaving their thread: a stack that training keeps as [in, out]
is turned over in words, not bytes.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.fused.rounding import _larger, byte_of, fake_rounded, rounding_arguments, scale_from_amax
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, Shape
from nemo_rl_dsv4.numerics.spec import QuantSpec

BLOCK = 128


@triton.jit
def _magnitude(x):
    """Bits of |x| as an integer, where NaN > Inf > numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _misfit(x, scale, MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, PUSH: tl.constexpr, NATIVE: tl.constexpr):
    """1 where no code times ``scale``, a power of two, is ``x``; float32."""
    y = fake_rounded(x, scale, MAX, True, MIN_NORMAL, PUSH, True, float("inf"), NATIVE)
    fits = (y == x) & (tl.abs(x) <= scale * MAX)
    return tl.where(fits, 0, 1)


@triton.jit
def _stack_kernel(
    x_ptr,
    code_ptr,  # TURNED: words of four codes, else bytes
    scale_ptr,
    source_ptr,  # laid out as scale_ptr
    damaged_ptr,
    x_matrix,  # elements from a matrix to the next, and from a row to the next
    x_row,
    code_matrix,
    code_row,
    scale_matrix,
    blocks_r,  # blocks of the matrix as it lies in memory
    blocks_c,
    SOURCE: tl.constexpr,  # whether a block that the scale at source_ptr represents exactly takes that one; 0: none
    TURNED: tl.constexpr,
    RELOAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    block = tl.program_id(0)
    matrix = (block // (blocks_r * blocks_c)).to(tl.int64)
    block_r = (block // blocks_c) % blocks_r
    block_c = block % blocks_c
    row = block_r.to(tl.int64) * BLOCK + tl.arange(0, BLOCK // 4) * 4  # first of four
    column = block_c.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + matrix * x_matrix + row[:, None] * x_row + column[None, :]
    x0 = tl.load(at).to(tl.float32)
    x1 = tl.load(at + x_row).to(tl.float32)
    x2 = tl.load(at + 2 * x_row).to(tl.float32)
    x3 = tl.load(at + 3 * x_row).to(tl.float32)
    near: tl.constexpr = 8
    largest = tl.maximum(tl.maximum(_magnitude(x0), _magnitude(x1)), tl.maximum(_magnitude(x2), _magnitude(x3)))
    largest = tl.reduce(tl.reshape(largest, (BLOCK // 4, BLOCK // near, near)), 2, _larger)
    largest = tl.reduce(tl.reduce(largest, 0, _larger)[None, :], 1, _larger)
    scale = scale_from_amax(largest, MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    one = tl.arange(0, 1)
    at_scale = matrix * scale_matrix + (block_c * blocks_r + block_r if TURNED else block_r * blocks_c + block_c) + one
    if SOURCE:
        source = tl.load(source_ptr + at_scale)
        if tl.reduce(tl.where((source > 0.0) & (source != scale), 1, 0), 0, _larger) != 0:
            wrong = tl.maximum(
                tl.maximum(
                    _misfit(x0, source[:, None], MAX, MIN_NORMAL, PUSH, NATIVE),
                    _misfit(x1, source[:, None], MAX, MIN_NORMAL, PUSH, NATIVE),
                ),
                tl.maximum(
                    _misfit(x2, source[:, None], MAX, MIN_NORMAL, PUSH, NATIVE),
                    _misfit(x3, source[:, None], MAX, MIN_NORMAL, PUSH, NATIVE),
                ),
            )
            wrong = tl.reduce(tl.reduce(wrong, 1, _larger)[None, :], 1, _larger)
            scale = tl.where(wrong == 0, source, scale)
    if RELOAD:
        x0 = tl.load(at, eviction_policy="evict_first").to(tl.float32)
        x1 = tl.load(at + x_row, eviction_policy="evict_first").to(tl.float32)
        x2 = tl.load(at + 2 * x_row, eviction_policy="evict_first").to(tl.float32)
        x3 = tl.load(at + 3 * x_row, eviction_policy="evict_first").to(tl.float32)
    c0 = byte_of(x0, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
    c1 = byte_of(x1, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
    c2 = byte_of(x2, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
    c3 = byte_of(x3, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, NATIVE)
    tl.store(scale_ptr + at_scale, scale)
    if TURNED:
        low = c0.to(tl.int32) | (c1.to(tl.int32) << 8)
        word = low | (c2.to(tl.int32) << 16) | (c3.to(tl.int32) << 24)
        word_row = block_r.to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        target = code_ptr + matrix * code_matrix + column[:, None] * code_row + word_row[None, :]
        tl.store(target, tl.trans(word))
    else:
        target = code_ptr + matrix * code_matrix + row[:, None] * code_row + column[None, :]
        tl.store(target, c0)
        tl.store(target + code_row, c1)
        tl.store(target + 2 * code_row, c2)
        tl.store(target + 3 * code_row, c3)
    tl.store(damaged_ptr + one, 1, mask=largest >= 0x7F800000)


def covers_source(x: Tensor, spec: QuantSpec) -> bool:
    """Whether ``quantize_stack`` can keep source scales of such values."""
    return spec.fmt == "e4m3fn" and spec.scale == "ue8m0" and x.dtype in (torch.float32, torch.bfloat16)


def covers(x: Tensor, spec: QuantSpec) -> bool:
    """Whether ``quantize_stack`` takes ``x`` [matrices, rows, cols]: whole square blocks, one dim without gaps."""
    rows, columns = x.shape[-2:]
    whole = rows % BLOCK == 0 and columns % BLOCK == 0 and x.numel() > 0
    plain = spec.block == (BLOCK, BLOCK) and spec.keep_last == 0 and spec.fmt != "e2m1"
    return x.dim() == 3 and whole and plain and 1 in (x.stride(-1), x.stride(-2))


def quantize_stack(
    x: Tensor,
    spec: QuantSpec,
    codes: Tensor,
    scale: Tensor,
    damaged: Tensor,
    *,
    source: Tensor | None = None,
    shape: Shape | None = None,
) -> None:
    """Quantize a stack in one launch that reads every value once.

    x: [matrices, rows, cols] for which ``covers`` holds. codes: uint8 [matrices, rows, cols], rows without gaps,
    matrices at any distance that is a multiple of 4 bytes. scale: float32 [matrices, rows/128, cols/128], likewise.
    damaged: int32 [1], set to 1 if an element is NaN or infinite. source: scales as of ``scale``, and laid out alike: a
    block whose values are codes times its power of two (2^-117 or more) takes it in place of its own; 0 for none. Only
    for e4m3fn, UE8M0, and float32 or BF16 values. shape: launch shape, for measuring.
    """
    matrices, rows, columns = x.shape
    turned = x.stride(-1) != 1
    shape = shape or SHAPES["stacks_turned" if turned else "stacks"]
    if turned:
        rows, columns = columns, rows
    assert source is None or (covers_source(x, spec) and source.stride() == scale.stride())
    target = codes.view(torch.int32) if turned else codes
    _stack_kernel[(matrices * (rows // BLOCK) * (columns // BLOCK),)](
        x,
        target,
        scale,
        scale if source is None else source,
        damaged,
        x.stride(0),
        x.stride(-1) if turned else x.stride(-2),
        target.stride(0),
        target.stride(-2),
        scale.stride(0),
        rows // BLOCK,
        columns // BLOCK,
        SOURCE=source is not None,
        TURNED=turned,
        RELOAD=shape.reload,
        BLOCK=BLOCK,
        num_warps=shape.warps,
        **rounding_arguments(spec, x.dtype),
    )
