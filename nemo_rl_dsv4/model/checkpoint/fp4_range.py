"""Whether FP4 weights fit FP8 without loss, told from their scales alone.

A 128x128 FP8 tile holds FP4 groups exactly while their scales span at most 2^14 (`numerics.merge_fp4_to_fp8`). Scales
are a sixteenth of the codes, so most tensors are settled without reading those; a group of zeros with a far scale makes
this test say no where the codes would say yes.
"""

from __future__ import annotations

import torch

from nemo_rl_dsv4.numerics.formats import e8m0_bytes_to_scale

REACH = 14
"""Octaves between the largest and the smallest scale of a tile that FP8 holds exactly."""
_GROUPS = 128 // 32


def scales_fit_fp8(scale: torch.Tensor) -> bool:
    """Return True where FP4 groups with these scales [out, in/32] (E8M0 bytes or float32) surely merge without loss."""
    values = scale if scale.dtype == torch.float32 else e8m0_bytes_to_scale(scale)
    exponents = values.contiguous().view(torch.int32) >> 23
    rows, cols = exponents.shape
    if not exponents.numel():
        return True
    pad = (0, -cols % _GROUPS, 0, -rows % 128)
    high, low = (
        torch.nn.functional.pad(exponents, pad, value=fill).view(-(-rows // 128), 128, -(-cols // _GROUPS), _GROUPS)
        for fill in (-1, 1 << 20)
    )
    return bool((high.amax((1, 3)) - low.amin((1, 3)) <= REACH).all())
