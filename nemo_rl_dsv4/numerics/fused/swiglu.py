"""Clamp, SwiGLU and group rounding of the expert hidden state in one pass, and its backward.

Reference: :mod:`nemo_rl_dsv4.numerics.swiglu`. Products and sums are not contracted to fused multiply-adds, and exp is
the library's, as torch computes them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from nemo_rl_dsv4.numerics.fused import rounding
from nemo_rl_dsv4.numerics.fused.groups import as_rows, group_offsets
from nemo_rl_dsv4.numerics.fused.rounding import (
    amax_bits,
    fake_rounded,
    load_float,
    quotient,
    reciprocal,
    rounding_arguments,
    scale_from_amax,
    store_rounded,
    to_bf16_grid,
)
from nemo_rl_dsv4.numerics.fused.shapes import SHAPES, tile_of
from nemo_rl_dsv4.numerics.scales import float_bits
from nemo_rl_dsv4.numerics.spec import QuantSpec

_INTERPRETED = knobs.runtime.interpret  # the interpreter has no libdevice


@triton.jit
def _clamped(gate, up, CLAMP: tl.constexpr, CLAMP_BF16: tl.constexpr, NATIVE: tl.constexpr):
    """Clamped gate and up as float32; NaN passes."""
    if NATIVE:
        g = tl.minimum(gate, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(up, -CLAMP, CLAMP, propagate_nan=tl.PropagateNan.ALL)
    else:
        g = tl.where(gate > CLAMP, CLAMP, gate)
        u = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
    if CLAMP_BF16:
        g = to_bf16_grid(g, NATIVE)
        u = to_bf16_grid(u, NATIVE)
    return g, u


@triton.jit
def _silu_and_sigmoid(g, CLAMP: tl.constexpr, SILU_BF16: tl.constexpr, LIBDEVICE: tl.constexpr, NATIVE: tl.constexpr):
    """(g / (1 + exp(-g)), 1 / (1 + exp(-g))) with both divisions rounded once."""
    negative = g * -1.0
    power = libdevice.exp(negative) if LIBDEVICE else tl.exp(negative)
    if NATIVE:
        # A quarter of the denominator, exactly: below 2^126 unless it is Inf, so that its reciprocal is normal.
        quarter = tl.fma(power, 0.25, 0.25)
        bounded = tl.minimum(quarter, 2.0**126)
        inverse = reciprocal(quarter, bounded)
        silu = quotient(g, bounded, inverse) * 0.25
        if float("inf") == CLAMP:
            silu = tl.where(g == float("inf"), g, silu)
        # A subnormal sigmoid has now been rounded twice; the remainder, times 2^22, tells when it went astray.
        sigmoid = inverse * 0.25
        remainder = tl.fma(sigmoid * -(2.0**24), bounded, 2.0**22)
        astray = tl.abs(remainder) > tl.maximum(quarter, 2.0**124) * 2.0**-126
        step = tl.where(astray, (remainder.to(tl.int32, bitcast=True) >> 31) | 1, 0)
        sigmoid = (sigmoid.to(tl.int32, bitcast=True) + step).to(tl.float32, bitcast=True)
    else:
        denominator = 1.0 + power
        silu = tl.div_rn(g, denominator)
        sigmoid = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), denominator)
    if SILU_BF16:
        silu = to_bf16_grid(silu, NATIVE)
    return silu, sigmoid


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    groups,
    columns,
    gate_stride,
    up_stride,
    CLAMP: tl.constexpr,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CLAMP_BF16: tl.constexpr,
    SILU_BF16: tl.constexpr,
    PRODUCT_BF16: tl.constexpr,
    LIBDEVICE: tl.constexpr,
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
    gate_at, write, inside = group_offsets(groups, columns, gate_stride, PER_ROW, GROUP, WIDTH, TILE, False)
    up_at, _, _ = group_offsets(groups, columns, up_stride, PER_ROW, GROUP, WIDTH, TILE, False)
    gate = load_float(gate_ptr + gate_at, inside, MASKED)
    up = load_float(up_ptr + up_at, inside, MASKED)
    g, u = _clamped(gate, up, CLAMP, CLAMP_BF16, NATIVE)
    silu, _ = _silu_and_sigmoid(g, CLAMP, SILU_BF16, LIBDEVICE, NATIVE)
    h = silu * u
    if PRODUCT_BF16:
        h = to_bf16_grid(h, NATIVE)
    scale = scale_from_amax(amax_bits(h, 1, NATIVE), MAX, LOWER, CARRY, MANTISSA, FLOOR_BITS, UE8M0)
    y = fake_rounded(h, scale[:, None], MAX, UE8M0, MIN_NORMAL, PUSH, SIGNED_ZERO, LIMIT, NATIVE)
    store_rounded(y_ptr + write, y, inside, MASKED, NATIVE)


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
    CLAMP: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    CLAMP_BF16: tl.constexpr,
    SILU_BF16: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    grad = load_float(grad_ptr + row * grad_stride + column, inside, MASKED)
    gate = load_float(gate_ptr + row * gate_stride + column, inside, MASKED)
    up = load_float(up_ptr + row * up_stride + column, inside, MASKED)
    g, u = _clamped(gate, up, CLAMP, CLAMP_BF16, NATIVE)
    silu, sigmoid = _silu_and_sigmoid(g, CLAMP, SILU_BF16, LIBDEVICE, NATIVE)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    grad_gate = tl.where(gate > CLAMP, 0.0, (grad * u) * slope)
    grad_up = tl.where(tl.abs(up) > CLAMP, 0.0, grad * silu)
    write = row * columns + column
    store_rounded(grad_gate_ptr + write, grad_gate, inside, MASKED, NATIVE)
    store_rounded(grad_up_ptr + write, grad_up, inside, MASKED, NATIVE)


def swiglu_forward(gate: Tensor, up: Tensor, spec: QuantSpec, limit: float, steps: tuple[str, ...]) -> Tensor:
    """Rounded hidden state [..., I] of ``gate`` and ``up``, contiguous; rows may be strided (halves of one tensor)."""
    columns = gate.shape[-1]
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    group = min(spec.block[1], columns)
    per_row = -(-columns // group)
    width = triton.next_power_of_2(group)
    tile = tile_of("swiglu", width)
    groups = gate_rows.shape[0] * per_row
    _forward_kernel[(-(-groups // tile),)](
        gate_rows,
        up_rows,
        y,
        groups,
        columns,
        gate_rows.stride(0),
        up_rows.stride(0),
        PER_ROW=per_row,
        GROUP=group,
        WIDTH=width,
        TILE=tile,
        MASKED=width != group or columns % group != 0 or groups % tile != 0,
        PRODUCT_BF16="product" in steps,
        num_warps=SHAPES["swiglu"].warps,
        **_activation_arguments(gate.dtype, limit, steps),
        **rounding_arguments(spec, torch.float32 if limit > 1e18 else None),  # a bounded product cannot overflow
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
    shape = SHAPES["swiglu_backward"]
    block = min(shape.elements, triton.next_power_of_2(columns))
    _backward_kernel[(gate_rows.shape[0], -(-columns // block))](
        grad_rows,
        gate_rows,
        up_rows,
        grad_gate,
        grad_up,
        columns,
        grad_rows.stride(0),
        gate_rows.stride(0),
        up_rows.stride(0),
        BLOCK=block,
        MASKED=columns % block != 0,
        NATIVE=rounding.NATIVE,
        num_warps=shape.warps,
        **_activation_arguments(gate.dtype, limit, steps),
    )
    return grad_gate, grad_up


def _activation_arguments(dtype: torch.dtype, limit: float, steps: tuple[str, ...]) -> dict[str, Any]:
    clamped_is_bf16 = dtype == torch.bfloat16 and float_bits(limit) & 0xFFFF == 0
    return {
        "CLAMP": limit,
        "CLAMP_BF16": "clamp" in steps and not clamped_is_bf16,
        "SILU_BF16": "silu" in steps,
        "LIBDEVICE": not _INTERPRETED,
        "enable_fp_fusion": False,
    }
