"""Every code point of every format, both ways, and the E8M0 scale bytes."""

import math
from itertools import pairwise

import pytest
import torch

from nemo_rl_dsv4.numerics import (
    NumericsError,
    e8m0_bytes_to_scale,
    pack_e2m1,
    pack_ue8m0,
    scale_to_e8m0_bytes,
    unpack_e2m1,
    unpack_ue8m0,
)
from nemo_rl_dsv4.numerics.formats import FORMATS, decode, encode

from . import scalar

FORMAT_NAMES = ["e4m3fn", "e4m3fnuz", "e2m1"]


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_every_code_point_decodes_and_encodes_back(fmt: str) -> None:
    codes = torch.arange(16 if fmt == "e2m1" else 256, dtype=torch.uint8)
    got = decode(codes, fmt)
    want = torch.tensor([scalar.decode(int(c), fmt) for c in codes])
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    assert torch.equal(got[numbers].view(torch.int32), want[numbers].view(torch.int32))
    assert torch.equal(encode(got[numbers], fmt), codes[numbers])
    limits = FORMATS[fmt]
    assert [int(c) for c in codes[~numbers]] == list(limits.nan_codes)
    positive = want[numbers][want[numbers] > 0]
    assert (positive.max(), positive.min()) == (limits.max_value, limits.min_subnormal)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_every_midpoint_and_its_neighbours_round_to_nearest_even(fmt: str) -> None:
    """torch's FP8 casts and our FP4 rounding against the scalar search, at the only places where they could differ."""
    values = sorted({scalar.decode(c, fmt) for c in range(128 if fmt != "e2m1" else 8)} - {math.nan})
    values = [v for v in values if v <= scalar.MAX[fmt]]
    probes = []
    for low, high in pairwise(values):
        middle = torch.tensor((low + high) / 2, dtype=torch.float32)
        probes += [middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))]
    probe = torch.stack(probes)
    probe = torch.cat([probe, -probe, torch.tensor([0.0, -0.0])])
    assert encode(probe, fmt).tolist() == [scalar.encode(float(v), fmt) for v in probe]


def test_e2m1_refuses_nan_and_packs_low_nibble_first() -> None:
    with pytest.raises(NumericsError, match="no NaN"):
        encode(torch.tensor([1.0, math.nan]), "e2m1")
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist()[:2] == [0x10, 0x32]
    assert torch.equal(unpack_e2m1(packed), codes) and torch.equal(unpack_e2m1(packed.view(torch.int8)), codes)
    with pytest.raises(NumericsError, match="must be even"):
        pack_e2m1(codes[:3])


def test_e8m0_bytes_are_exponents_and_not_numbers() -> None:
    """C006, C007: byte 120 is 2^-7, not 120.0; scales are float32, on which arithmetic works."""
    scale = e8m0_bytes_to_scale(torch.tensor([120], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert scale.dtype == torch.float32 and (scale * 2.0).item() == 2.0**-6
    every = torch.arange(255, dtype=torch.uint8)
    scales = e8m0_bytes_to_scale(every)
    assert scales.tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert torch.equal(scale_to_e8m0_bytes(scales), every)
    assert e8m0_bytes_to_scale(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("bad", [1.4, 0.0, -1.0, 0.0123, math.inf, math.nan, 2.0**-128])
def test_a_scale_that_is_no_power_of_two_is_named_not_rounded(bad: float) -> None:
    """C003, C004, C008: casts turn 1.4 into 1, 0 into 2^-127 and -1 into 1; packing leaked mantissa bits."""
    scale = torch.tensor([[1.0, 2.0, bad, 0.5]])
    for store in (scale_to_e8m0_bytes, pack_ue8m0):
        with pytest.raises(NumericsError, match=r"w\.scale\[0, 2\] is .*not a positive power of two"):
            store(scale, name="w.scale")


def test_packed_scales_for_blackwell() -> None:
    """C005, C019: float scales spread over blocks and byte 0 are refused; powers of two pack four to a word."""
    with pytest.raises(NumericsError):
        pack_ue8m0(torch.tensor(0.37).expand(3, 4))
    scale = 2.0 ** torch.arange(-7, 8, dtype=torch.float32).reshape(3, 5)
    packed = pack_ue8m0(scale)
    assert packed.shape == (3, 2) and packed.dtype == torch.int32 and packed.stride() == (1, 4)
    assert packed[0, 0].item() == 120 | 121 << 8 | 122 << 16 | 123 << 24
    assert packed[0, 1].item() == 124
    assert torch.equal(unpack_ue8m0(packed, 5), scale)
    with pytest.raises(NumericsError, match=r"w\.scale holds 2\^-127 \(byte 0\), which kernels refuse"):
        pack_ue8m0(torch.tensor([[1.0, 2.0**-127]]), name="w.scale")
