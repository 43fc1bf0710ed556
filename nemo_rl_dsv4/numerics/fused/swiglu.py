"""Clamp, SwiGLU and group rounding of the expert hidden state in one pass, and its backward.

Reference: :mod:`nemo_rl_dsv4.numerics.swiglu`. Products and sums are not contracted to fused multiply-adds, and exp is
the library's, as torch computes them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from nemo_rl_dsv4.numerics.fused.groups import as_rows
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    fake_rounded,
    limit_of,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
    to_bf16_grid,
)
from nemo_rl_dsv4.numerics.spec import QuantSpec

TILE_ELEMENTS = 4096
NUM_WARPS = 8
_INTERPRETED = knobs.runtime.interpret  # the interpreter has no libdevice


@triton.jit
def _activation(
    gate,
    up,
    limit,
    CLAMP_BF16: tl.constexpr,
    SILU_BF16: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """(clamped gate, clamped up, 1 + exp(-gate), silu), each as float32; NaN passes the clamps."""
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if CLAMP_BF16:
        g = to_bf16_grid(g)
        u = to_bf16_grid(u)
    denominator = 1.0 + (libdevice.exp(-g) if LIBDEVICE else tl.exp(-g))
    silu = tl.div_rn(g, denominator)
    if SILU_BF16:
        silu = to_bf16_grid(silu)
    return g, u, denominator, silu


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    carry_ptr,
    groups,
    groups_per_row,
    columns,
    gate_stride,
    up_stride,
    clamp,
    limit,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CLAMP_BF16: tl.constexpr,
    SILU_BF16: tl.constexpr,
    PRODUCT_BF16: tl.constexpr,
    LIBDEVICE: tl.constexpr,
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
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH)
    row = (group // groups_per_row).to(tl.int64)[:, None]
    column = (group % groups_per_row)[:, None] * GROUP + lane[None, :]
    inside = (group < groups)[:, None] & (lane < GROUP)[None, :] & (column < columns)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    _, u, _, silu = _activation(gate, up, clamp, CLAMP_BF16, SILU_BF16, LIBDEVICE)
    h = silu * u
    if PRODUCT_BF16:
        h = to_bf16_grid(h)
    scale = scale_from_amax(amax_bits(h, 1), carry_ptr, MAX, LOWER, CARRY, FLOOR_BITS, UE8M0, LOG2F)
    y = fake_rounded(h, scale[:, None], limit, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO)
    store_rounded(y_ptr + row * columns + column, y, inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    clamp,
    BLOCK: tl.constexpr,
    CLAMP_BF16: tl.constexpr,
    SILU_BF16: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    g, u, denominator, silu = _activation(gate, up, clamp, CLAMP_BF16, SILU_BF16, LIBDEVICE)
    sigmoid = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), denominator)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    grad_gate = tl.where(gate > clamp, 0.0, (grad * u) * slope)
    grad_up = tl.where((up > clamp) | (up < -clamp), 0.0, grad * silu)
    store_rounded(grad_gate_ptr + row * columns + column, grad_gate, inside)
    store_rounded(grad_up_ptr + row * columns + column, grad_up, inside)


def swiglu_forward(gate: Tensor, up: Tensor, spec: QuantSpec, limit: float, steps: tuple[str, ...]) -> Tensor:
    """Rounded hidden state [..., I] of ``gate`` and ``up``, contiguous; rows may be strided (halves of one tensor)."""
    columns = gate.shape[-1]
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    group = min(spec.block[1], columns)
    per_row = triton.cdiv(columns, group)
    width = triton.next_power_of_2(group)
    tile = max(1, TILE_ELEMENTS // width)
    groups = gate_rows.shape[0] * per_row
    _forward_kernel[(triton.cdiv(groups, tile),)](
        gate_rows,
        up_rows,
        y,
        groups=groups,
        groups_per_row=per_row,
        columns=columns,
        gate_stride=gate_rows.stride(0),
        up_stride=up_rows.stride(0),
        clamp=limit,
        limit=limit_of(torch.float32),
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        PRODUCT_BF16="product" in steps,
        num_warps=NUM_WARPS,
        **_activation_arguments(steps),
        **rounding_arguments(spec, gate),
    )
    return y


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, limit: float, steps: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up`` [..., I] in their dtype, contiguous; the activation is computed again."""
    columns = gate.shape[-1]
    grad_rows, gate_rows, up_rows = as_rows(grad), as_rows(gate), as_rows(up)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    block = min(2048, triton.next_power_of_2(columns))
    _backward_kernel[(gate_rows.shape[0], triton.cdiv(columns, block))](
        grad_rows,
        gate_rows,
        up_rows,
        grad_gate,
        grad_up,
        columns=columns,
        grad_stride=grad_rows.stride(0),
        gate_stride=gate_rows.stride(0),
        up_stride=up_rows.stride(0),
        clamp=limit,
        BLOCK=block,
        num_warps=NUM_WARPS,
        **_activation_arguments(steps),
    )
    return grad_gate, grad_up


def _activation_arguments(steps: tuple[str, ...]) -> dict[str, bool]:
    return {
        "CLAMP_BF16": "clamp" in steps,
        "SILU_BF16": "silu" in steps,
        "LIBDEVICE": not _INTERPRETED,
        "enable_fp_fusion": False,
    }
