"""Conversions that must keep every value, and the Hadamard transform."""

import pytest
import torch

from nemo_rl_dsv4.numerics import (
    NumericsError,
    QuantSpec,
    dequantize,
    e4m3fn_to_fnuz,
    hadamard,
    merge_fp4_to_fp8,
    quantize,
)

from . import scalar

FP4 = QuantSpec("e2m1", (1, 32))


def test_fnuz_reading_of_fn_bytes_keeps_the_values() -> None:
    """C055: fn bytes read as fnuz halve, 0x80 is NaN there; doubling the scale and mapping 0x80 to 0x00 is exact."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    data, scale = e4m3fn_to_fnuz(codes.view(torch.float8_e4m3fn), torch.tensor([0.25]))
    assert data.dtype == torch.float8_e4m3fnuz and scale.item() == 0.5
    assert data.view(torch.uint8)[codes == 0x80].item() == 0 and data.view(torch.uint8)[codes == 0x7E].item() == 0x7E
    want = torch.tensor([scalar.decode(int(c), "e4m3fn") for c in codes]) * 0.25
    assert torch.equal(data.to(torch.float32) * scale, want)
    for nan in (0x7F, 0xFF):
        with pytest.raises(NumericsError, match=r"w\[1\] is NaN"):
            e4m3fn_to_fnuz(torch.tensor([0, nan], dtype=torch.uint8), torch.ones(1), name="w")
    with pytest.raises(NumericsError, match="wanted float32"):
        e4m3fn_to_fnuz(codes, torch.tensor([120], dtype=torch.uint8).view(torch.float8_e8m0fnu))


def test_quantizing_to_fnuz_with_max_224_equals_converting_from_fn() -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    fn = quantize(x, QuantSpec(block=(1, 128)))
    data, scale = e4m3fn_to_fnuz(fn.data, fn.scale)
    fnuz = quantize(x, QuantSpec("e4m3fnuz", (1, 128), fnuz_max=224.0))
    assert torch.equal(fnuz.scale, scale) and torch.equal(fnuz.data.view(torch.uint8), data.view(torch.uint8))


def test_the_fnuz_maximum_is_a_setting() -> None:
    """C057: amax 240 has scale 1 under torch's max 240 and 240/224 = 1.071 under vLLM's 224."""
    x = torch.zeros(1, 128)
    x[0, 0] = 240.0
    scales = [
        quantize(x, QuantSpec("e4m3fnuz", (1, 128), "float32", fnuz_max=largest)).scale.item()
        for largest in (240.0, 224.0)
    ]
    assert scales == [1.0, pytest.approx(240 / 224, rel=1e-7)]


def _fp4_tile(exponents: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One 128x128 tile of every e2m1 code and a scale 2^e a row group, e cycling through ``exponents``."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (128, 64), generator=generator, dtype=torch.uint8)
    packed[:, ::16] = 0x11  # 0.5 twice in every group: the value that vanishes first
    scale = torch.tensor([2.0 ** exponents[i % len(exponents)] for i in range(512)]).reshape(128, 4)
    return packed, scale


def test_fp4_merges_into_fp8_exactly_up_to_a_range_of_2_to_14() -> None:
    """C026: 2^14 between the scales of a tile is exact, 2^15 would lose 0.5 and must raise."""
    packed, scale = _fp4_tile([0, -14, -3])
    merged = merge_fp4_to_fp8(packed, scale)
    values = torch.tensor([scalar.decode(int(c), "e2m1") for b in packed.flatten() for c in (b & 15, b >> 4)])
    want = values.reshape(128, 128) * scale.repeat_interleave(32, 1)
    assert merged.scale.tolist() == [[2.0**-6]]
    assert torch.equal(dequantize(merged, torch.float32), want)
    packed, scale = _fp4_tile([0, -15])
    with pytest.raises(NumericsError, match=r"experts\.3\.w1: tile \[0, 0\] has FP4 scales from 3\.05176e-05 to 1"):
        merge_fp4_to_fp8(packed, scale, name="experts.3.w1")


def test_fp4_merge_takes_partial_tiles_stacked_experts_and_e8m0_bytes() -> None:
    x = torch.randn(2, 130, 320, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e4
    x[0, 0, :32] = 0.0
    q = quantize(x, FP4)
    bytes_ = (q.scale.view(torch.int32) >> 23).to(torch.uint8)
    merged = merge_fp4_to_fp8(q.data, bytes_.view(torch.float8_e8m0fnu))
    assert merged.scale.shape == (2, 2, 3)
    assert torch.equal(dequantize(merged, torch.float32), dequantize(q, torch.float32))
    with pytest.raises(NumericsError, match="wants"):
        merge_fp4_to_fp8(q.data, q.scale[..., :-1])


def test_a_zero_group_neither_widens_the_range_nor_sets_the_tile_scale() -> None:
    packed, scale = _fp4_tile([-30])
    packed[7] = 0
    scale[7] = 1.0  # what quantize gives an all-zero group
    merged = merge_fp4_to_fp8(packed, scale)
    assert merged.scale.item() == 2.0**-36
    assert merge_fp4_to_fp8(packed * 0, scale).scale.item() == 1.0


def test_hadamard_is_its_own_inverse_and_matches_the_definition() -> None:
    """C074: plain torch with scale d^-0.5, so no CUDA-only package is needed."""
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-6)  # measured 3.6e-7
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]) / 4
    torch.testing.assert_close(hadamard(x[:, :16]), x[:, :16] @ matrix, rtol=0, atol=1e-6)
    assert hadamard(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(NumericsError, match="power-of-two last dim; found 96"):
        hadamard(x[:, :96])
