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
    limit_of,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
)
from nemo_rl_dsv4.numerics.spec import QuantSpec

TILE_ELEMENTS = 4096
NUM_WARPS = 4


@triton.jit
def _fake_quant_kv_kernel(
    x_ptr,
    y_ptr,
    carry_ptr,
    rows,
    columns,
    body,
    row_stride,
    limit,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a row, kept channels included, rounded up to a power of two
    TILE: tl.constexpr,  # rows a program
    MAX: tl.constexpr,
    LOWER: tl.constexpr,
    CARRY: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    UE8M0: tl.constexpr,
    LOG2F: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    PUSH: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    slot = tl.arange(0, TILE * GROUPS)
    row = (tl.program_id(0) * TILE + slot // GROUPS).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    column = (slot % GROUPS)[:, None] * GROUP + lane[None, :]
    inside = (row < rows)[:, None] & (lane < GROUP)[None, :] & (column < columns)
    raw = tl.load(x_ptr + row[:, None] * row_stride + column, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    quantized = column < body
    scale = scale_from_amax(
        amax_bits(tl.where(quantized, x, 0.0), 1), carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F
    )
    y = fake_rounded(x, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
    store_rounded(y_ptr + row[:, None] * columns + column, tl.where(quantized, y, x), inside)


def fake_quant_kv(x: Tensor, spec: QuantSpec) -> Tensor:
    """``x`` [..., n] with its first n - keep_last channels rounded in groups, contiguous, in its dtype."""
    columns = x.shape[-1]
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    group = spec.block[1]
    width = triton.next_power_of_2(group)
    groups = triton.next_power_of_2(triton.cdiv(columns, group))
    tile = max(1, TILE_ELEMENTS // (groups * width))
    _fake_quant_kv_kernel[(triton.cdiv(rows.shape[0], tile),)](
        rows,
        y,
        rows=rows.shape[0],
        columns=columns,
        body=columns - spec.keep_last,
        row_stride=rows.stride(0),
        limit=limit_of(x.dtype),
        GROUP=group,
        WIDTH=width,
        GROUPS=groups,
        TILE=tile,
        num_warps=NUM_WARPS,
        **rounding_arguments(spec, x),
    )
    return y
