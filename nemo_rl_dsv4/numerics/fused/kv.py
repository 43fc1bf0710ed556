"""KV-cache fake quantization: groups on the leading channels, the trailing RoPE channels copied, in one pass.

Reference: :func:`nemo_rl_dsv4.numerics.fake_quant.reference_fake_quant` with block (1, g) and ``keep_last`` > 0.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_dsv4.numerics.fused.groups import as_rows
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    fake_rounded,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.spec import QuantSpec


@triton.jit
def _fake_quant_kv_kernel(
    x_ptr,
    y_ptr,
    rows,
    columns,
    row_stride,
    BODY: tl.constexpr,  # channels before the kept ones
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a row, kept channels included, rounded up to a power of two
    TILE: tl.constexpr,  # rows a program
    FLAT: tl.constexpr,  # rows are contiguous and GROUPS * WIDTH long
    MASKED: tl.constexpr,
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
    first = tl.program_id(0) * TILE
    slot = tl.arange(0, TILE * GROUPS)
    row = first + slot // GROUPS
    lane = tl.arange(0, WIDTH)
    column = (slot % GROUPS)[:, None] * GROUP + lane[None, :]
    inside = (row < rows)[:, None]
    if FLAT:
        read = first.to(tl.int64) * (GROUPS * WIDTH) + (slot[:, None] * WIDTH + lane[None, :])
        write = read
    else:
        inside = inside & (lane < GROUP)[None, :] & (column < columns)
        read = row.to(tl.int64)[:, None] * row_stride + column
        write = row.to(tl.int64)[:, None] * columns + column
    raw = tl.load(x_ptr + read, mask=inside, other=0.0) if MASKED else tl.load(x_ptr + read)
    x = raw.to(tl.float32)
    quantized = column < BODY
    # A group of kept channels only may have any scale.
    measured = x if BODY % GROUP == 0 else tl.where(quantized, x, 0.0)
    scale = scale_from_amax(amax_bits(measured, 1, NATIVE), MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    y = fake_rounded(x, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, LIMIT, NATIVE)
    # Two stores of which one happens: to choose between the values first would cost more.
    store_rounded(y_ptr + write, y, inside & quantized, True, NATIVE)
    tl.store(y_ptr + write, raw, mask=inside & (column >= BODY))


def fake_quant_kv(x: Tensor, spec: QuantSpec) -> Tensor:
    """``x`` [..., n] with its first n - keep_last channels rounded in groups, contiguous, in its dtype."""
    columns = x.shape[-1]
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    group = spec.block[1]
    width = triton.next_power_of_2(group)
    groups = triton.next_power_of_2(-(-columns // group))
    tile = tile_of("kv", groups * width)
    flat = columns == groups * width and width == group and rows.stride(0) == columns
    _fake_quant_kv_kernel[(-(-rows.shape[0] // tile),)](
        rows,
        y,
        rows.shape[0],
        columns,
        rows.stride(0),
        BODY=columns - spec.keep_last,
        GROUP=group,
        WIDTH=width,
        GROUPS=groups,
        TILE=tile,
        FLAT=flat,
        MASKED=not flat or rows.shape[0] % tile != 0,
        num_warps=SHAPES["kv"].warps,
        **rounding_arguments(spec, x.dtype),
    )
    return y
