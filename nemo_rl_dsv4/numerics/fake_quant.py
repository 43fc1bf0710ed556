"""Straight-through rounding: the forward value is what the rollout computes, the gradient passes unchanged.

Nothing saturates (see :mod:`nemo_rl_dsv4.numerics.blockwise`), so the identity gradient needs no mask.
"""

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.blockwise import QuantSpec, fake_quant_values


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, spec: QuantSpec) -> Tensor:
        return fake_quant_values(x, spec)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quant(x: Tensor, spec: QuantSpec) -> Tensor:
    """``dequantize(quantize(x, spec), x.dtype)`` with identity gradient; same shape, dtype and device as ``x``.

    x: float32, bfloat16 or float16 [..., rows, cols] or [cols]. The bits equal those of the two-step form everywhere.
    A block that holds a NaN or Inf comes out as NaN.
    """
    return _StraightThrough.apply(x, spec)
