"""Scale layout of Blackwell GEMMs: four UE8M0 exponents to an int32, rows contiguous. Only for the live refit path.

Being a power of two is a property of the number, the layout one of the storage: float32 scales with a mantissa are
rejected here, because or-ing their words together would leak mantissa bits into the neighbouring exponents.
"""

import math

import torch
from torch import Tensor

from nemo_rl_dsv4.numerics.formats import NumericsError, e8m0_bytes_to_scale, scale_to_e8m0_bytes

_ROW_ALIGNMENT = 4  # 16 bytes of int32, what a TMA descriptor asks of a leading stride


def pack_ue8m0(scale: Tensor, *, name: str = "scale") -> Tensor:
    """float32 powers of two [..., rows, k] as int32 [..., rows, ceil(k/4)], the k-th exponent in byte k % 4.

    Missing exponents of the last word are 0. Strides are MN-major: (..., 1, rows rounded up to 4). NumericsError names
    the first scale that is not a positive power of two.
    """
    if scale.dim() < 2:
        raise NumericsError(f"{name} has shape {list(scale.shape)}; packing wants [..., rows, k]")
    codes = scale_to_e8m0_bytes(scale, name=name)
    if bool((codes == 0).any()):
        raise NumericsError(f"{name} holds 2^-127 (byte 0), which kernels refuse; wanted 2^-126 or more")
    rows, k = codes.shape[-2:]
    words = math.ceil(k / 4)
    aligned = math.ceil(rows / _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    padded = torch.zeros((*codes.shape[:-2], aligned, words * 4), dtype=torch.uint8, device=scale.device)
    padded[..., :rows, :k] = codes
    packed = padded.view(torch.int32).transpose(-1, -2).contiguous()
    return packed.transpose(-1, -2)[..., :rows, :]


def unpack_ue8m0(packed: Tensor, k: int) -> Tensor:
    """Inverse of :func:`pack_ue8m0`: int32 [..., rows, ceil(k/4)] to float32 [..., rows, k]."""
    if packed.dtype != torch.int32 or packed.shape[-1] != math.ceil(k / 4):
        raise NumericsError(
            f"packed scales are {packed.dtype} {list(packed.shape)}; k={k} wants int32 [..., {-(-k // 4)}]"
        )
    return e8m0_bytes_to_scale(packed.contiguous().view(torch.uint8)[..., :k])
