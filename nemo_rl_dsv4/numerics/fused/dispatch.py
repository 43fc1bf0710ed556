"""Which kernel covers a spec. None means that the torch reference does it."""

import torch
import triton
from torch import Tensor

from nemo_rl_dsv4.numerics.fused.group_bytes import covers, dequantize_groups, quantize_groups
from nemo_rl_dsv4.numerics.fused.groups import fake_quant_groups
from nemo_rl_dsv4.numerics.fused.kv import fake_quant_kv
from nemo_rl_dsv4.numerics.fused.weights import dequantize_tiles, fake_quant_tiles, quantize_tiles
from nemo_rl_dsv4.numerics.spec import QuantSpec

_MIN_TILE, _MAX_TILE = 1024, 128 * 256  # elements of a block that one program holds in registers
_MAX_GROUP = 4096


def fake_quant(x: Tensor, spec: QuantSpec) -> Tensor | None:
    """``fake_quant_values`` of a GPU tensor [..., rows, cols] that is not empty, or None."""
    if spec.block[0] == 1 and spec.block[1] <= _MAX_GROUP:
        if spec.keep_last == 0:
            return fake_quant_groups(x, spec)
        row = triton.next_power_of_2(triton.cdiv(x.shape[-1], spec.block[1])) * spec.block[1]
        return fake_quant_kv(x, spec) if row <= _MAX_GROUP else None
    return fake_quant_tiles(x, spec) if _tile_fits(spec) else None


def quantize(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor] | None:
    """FP8 data and scale grid of a GPU tensor [..., rows, cols] that is not empty, or None."""
    if covers(x.shape, spec):
        return quantize_groups(x, spec)
    return quantize_tiles(x, spec) if _tile_fits(spec) and spec.fmt != "e2m1" else None


def dequantize(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor | None:
    """Values of FP8 ``data`` on a GPU that is not empty, or None."""
    if covers(data.shape, spec):
        return dequantize_groups(data, scale, spec, dtype)
    return dequantize_tiles(data, scale, spec, dtype) if _tile_fits(spec) and spec.fmt != "e2m1" else None


def _tile_fits(spec: QuantSpec) -> bool:
    area = int(triton.next_power_of_2(spec.block[0])) * int(triton.next_power_of_2(spec.block[1]))
    return spec.keep_last == 0 and _MIN_TILE <= area <= _MAX_TILE
