"""Format changes that keep every value: e4m3fn bytes to e4m3fnuz, and FP4 1x32 groups to FP8 128x128 tiles."""

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.blockwise import Quantized
from nemo_rl_dsv4.numerics.formats import (
    MIN_SCALE,
    NumericsError,
    decode,
    e8m0_bytes_to_scale,
    require_power_of_two,
    unpack_e2m1,
)
from nemo_rl_dsv4.numerics.spec import QuantSpec
from nemo_rl_dsv4.numerics.tiling import blocked, grid_shape, regions

_FP4_GROUP = 32
_TILE_HEADROOM = 2.0**6  # e2m1 reaches 6, and 6 * 2^6 = 384 is the largest such product that e4m3fn holds
_TILE_REACH = 2.0**14  # 0.5 * 2^6 / 2^14 = 2^-9 is e4m3fn's smallest subnormal


def e4m3fn_to_fnuz(data: Tensor, scale: Tensor, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """Reads e4m3fn bytes as e4m3fnuz: the same values, as (float8_e4m3fnuz data, float32 scale * 2).

    fnuz has one more exponent bias, so every byte halves. Byte 0x80, minus zero in fn and NaN in fnuz, becomes 0x00.
    fn's NaN bytes 0x7f and 0xff have no counterpart: NumericsError names the first. data: float8_e4m3fn or uint8, any
    shape; scale: float32 of any grid (an E8M0 dtype cannot be doubled, decode it first).
    """
    if scale.dtype != torch.float32:
        raise NumericsError(f"scale of {name} is {scale.dtype}; wanted float32 (decode E8M0 bytes first)")
    codes = data.contiguous().view(torch.uint8)
    nan = (codes & 0x7F) == 0x7F
    if bool(nan.any()):
        index = nan.nonzero()[0].tolist()
        raise NumericsError(f"{name}{index} is NaN in e4m3fn (byte 0x7f or 0xff) and cannot become e4m3fnuz")
    codes = codes.masked_fill(codes == 0x80, 0)
    return codes.view(torch.float8_e4m3fnuz), scale * 2.0


def merge_fp4_to_fp8(packed: Tensor, scale: Tensor, *, name: str = "tensor") -> Quantized:
    """FP4 weights with a scale per 32 columns as FP8 weights with a scale per 128x128 tile, without any loss.

    packed: uint8 or int8 [..., out, in/2], low nibble first. scale: [..., out, in/32], float32 powers of two or E8M0
    (uint8, float8_e8m0fnu). The tile's scale is its largest group scale / 2^6, a code fp4 * group / tile. That is exact
    while the scales of a tile's non-zero groups span at most 2^14; NumericsError names the tile otherwise, since values
    would vanish: dequantize and quantize such a tensor anew if that loss is wanted.
    """
    codes = unpack_e2m1(packed)
    groups = codes.shape[-1] / _FP4_GROUP
    if scale.dtype != torch.float32:
        scale = e8m0_bytes_to_scale(scale)
    if scale.shape != (*codes.shape[:-1], groups):
        wanted = [*codes.shape[:-1], groups]
        raise NumericsError(
            f"scale of {name} has shape {list(scale.shape)}; FP4 data {list(packed.shape)} wants {wanted}"
        )
    require_power_of_two(scale, name=f"scale of {name}")
    values = decode(codes, "e2m1").unflatten(-1, (-1, _FP4_GROUP))
    empty = values.abs().amax(-1) == 0.0
    # Zero groups carry no information: they must neither raise the tile's scale nor widen its range.
    largest = scale.masked_fill(empty, 0.0)
    smallest = scale.masked_fill(empty, torch.inf)
    spec = QuantSpec("e4m3fn", (128, 128), "ue8m0")
    tile = torch.empty(grid_shape(codes.shape, spec.block), dtype=torch.float32, device=codes.device)
    per_group = torch.empty_like(scale)
    for region, grid in regions(scale.shape, (128, 128 // _FP4_GROUP)):
        high = blocked(largest[region], (128, 128 // _FP4_GROUP)).amax((-3, -1), keepdim=True)
        low = blocked(smallest[region], (128, 128 // _FP4_GROUP)).amin((-3, -1), keepdim=True)
        merged = (high / _TILE_HEADROOM).clamp_min(MIN_SCALE).masked_fill(high == 0.0, 1.0)
        lossy = low / merged < _TILE_HEADROOM / _TILE_REACH
        if bool(lossy.any()):
            at = lossy.squeeze(-1).squeeze(-2).nonzero()[0].tolist()
            where = tuple(lossy.nonzero()[0].tolist())
            at[-2] += grid[-2].start
            at[-1] += grid[-1].start
            raise NumericsError(
                f"{name}: tile {at} has FP4 scales from {low[where].item():g} to {high[where].item():g}; one FP8 scale "
                "holds a range of 2^14 exactly, so this one would lose its smallest values; keep the tensor in FP4"
            )
        tile[grid].copy_(merged.squeeze(-1).squeeze(-2))
        spread = merged.expand_as(blocked(largest[region], (128, 128 // _FP4_GROUP)))
        per_group[region].copy_(spread.reshape(largest[region].shape))
    ratio = torch.where(empty, 1.0, scale / per_group)
    data = (values * ratio[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return Quantized(data, tile, spec, data.shape)
