"""Fast decoding on a CPU has the bits of the reference, for every code, and steps aside where it could not."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.model import exact_decode
from nemo_rl_dsv4.model.stored_weight import FP4_SPEC, FP8_SPEC
from nemo_rl_dsv4.numerics import Quantized
from nemo_rl_dsv4.numerics.blockwise import reference_dequantize

DTYPES = [torch.bfloat16, torch.float32]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (130, 300), (256, 5000)])
def test_every_fp8_code_at_every_scale(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[0, :256] = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.randint(-100, 7, grid, generator=generator).float().exp2()
    data = codes.view(torch.float8_e4m3fn)
    found = exact_decode.decode(data, scale, dtype, packed=False)
    wanted = reference_dequantize(Quantized(data, scale, FP8_SPEC, data.shape), dtype)
    assert found is not None and torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (300, 4096)])
def test_every_fp4_pair_at_every_scale(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(-100, 7, (shape[0], shape[1] // 32), generator=generator).float().exp2()
    found = exact_decode.decode(packed, scale, dtype, packed=True)
    wanted = reference_dequantize(Quantized(packed, scale, FP4_SPEC, torch.Size(shape)), dtype)
    assert found is not None and torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("scale", [0.75, 2.0**-101, 2.0**7])
def test_other_scales_are_left_to_the_reference(scale: float) -> None:
    codes = torch.zeros(1, 128, dtype=torch.float8_e4m3fn)
    assert exact_decode.decode(codes, torch.full((1, 1), scale), torch.bfloat16, packed=False) is None
    assert exact_decode.decode(codes, torch.ones(1, 1), torch.float16, packed=False) is None
