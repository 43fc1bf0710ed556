"""Walsh-Hadamard transform in plain torch, for the indexer of the DeepSeek reference."""

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError


def hadamard(x: Tensor) -> Tensor:
    """Transforms the last dim [..., d] with scale d^-0.5, so that applying it twice gives x back.

    d is a power of two (NumericsError otherwise). Computed in float32 by log2(d) butterflies in natural (Sylvester)
    order and cast once to x's dtype; differentiable.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise NumericsError(f"the Hadamard transform needs a power-of-two last dim; found {size}")
    out = x.to(torch.float32)
    half = 1
    while half < size:
        pairs = out.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return (out * size**-0.5).to(x.dtype)
