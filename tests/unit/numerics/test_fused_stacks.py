"""Stacks quantized in one launch against the reference, under Triton's interpreter."""

import pytest
import torch

from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.numerics.blockwise import reference_quantize
from nemo_rl_dsv4.refit.source_scales import keep_source_scale

from . import interpreted

pytest.importorskip("triton")
FUSED = interpreted.load()


def stack(dtype: torch.dtype, turned: bool) -> torch.Tensor:
    """[2, 256, 384]: blocks of all sizes, one of zeros, one with an amax a few ulp above max * 2^e; odd row stride."""
    x = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 384)
    x[0, :128, :128] = 0.0
    x[1, 128:, 128:256] = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)) * 1e-3
    x[1, 130, 130] = torch.tensor(448.0 * 2.0**-5).view(torch.int32).add(2).view(torch.float32)
    x = x.to(dtype)
    if turned:
        return torch.cat([x, x], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, :256]
    return torch.cat([x, x], 2)[:, :, 384:]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "spec", [QuantSpec(), QuantSpec("e4m3fnuz", scale="float32"), QuantSpec(scale_rounding="log2f")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_become_the_references_bytes(spec: QuantSpec, dtype: torch.dtype, turned: bool) -> None:
    """Straight and turned over, into memory with gaps between matrices."""
    stacks = FUSED["stacks"]
    x = stack(dtype, turned)
    assert (x.stride(-1) != 1) == turned
    assert stacks.covers(x, spec)
    want = reference_quantize(x, spec)
    codes = torch.full((2, 300, 384), 7, dtype=torch.uint8)
    scale, damaged = torch.empty(2, 2, 3), torch.zeros(1, dtype=torch.int32)
    stacks.quantize_stack(x, spec, codes[:, :256], scale, damaged)
    assert torch.equal(codes[:, :256], want.data.view(torch.uint8))
    assert torch.equal(scale, want.scale)
    assert bool((codes[:, 256:] == 7).all())
    assert damaged.tolist() == [0]
    reloaded = torch.empty_like(codes)
    stacks.quantize_stack(
        x,
        spec,
        reloaded[:, :256],
        scale,
        damaged,
        shape=FUSED["shapes"].Shape(16384, 4, not FUSED["shapes"].SHAPES["stacks"].reload),
    )
    assert torch.equal(reloaded[:, :256], codes[:, :256])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_keep_the_source_scale_that_represents_them(dtype: torch.dtype, turned: bool) -> None:
    """Exact under twice and four times their scale, too small a scale, none, a trained block, and a block of zeros."""
    stacks, spec = FUSED["stacks"], QuantSpec()
    codes = torch.randint(-8, 9, (1, 256, 384), generator=torch.Generator().manual_seed(0)).float()
    codes[0, ::128, ::128] = 8.0
    x = codes * 2.0**-12
    x[0, 200, 10] *= 1.0625  # trained: a fourth bit of mantissa
    x[0, 128:, 128:256] = -0.0
    own = reference_quantize(x, spec).scale
    factor = torch.tensor([[[2.0, 4.0, 0.5], [4.0, 8.0, 0.0]]])
    source = own * factor
    x = x.to(dtype)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
    want = keep_source_scale(reference_quantize(x[0], spec), x[0], torch.where(source > 0, source, 1.5)[0])
    out, scale = torch.empty(1, 256, 384, dtype=torch.uint8), torch.empty_like(own)
    stacks.quantize_stack(x, spec, out, scale, torch.zeros(1, dtype=torch.int32), source=source)
    assert torch.equal(scale[0], want.scale)
    assert torch.equal(out[0], want.data.view(torch.uint8))
    taken = (scale == source)[0].tolist()
    assert taken == [[True, True, False], [False, True, False]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_damaged_element_is_noted(bad: float) -> None:
    stacks, spec = FUSED["stacks"], QuantSpec()
    x = torch.ones(1, 128, 256)
    x[0, 5, 200] = bad
    codes, scale = torch.empty(1, 128, 256, dtype=torch.uint8), torch.empty(1, 1, 2)
    damaged = torch.zeros(1, dtype=torch.int32)
    stacks.quantize_stack(x, spec, codes, scale, damaged)
    assert damaged.tolist() == [1]
    assert not scale.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((1, 100, 128), QuantSpec()),
        ((1, 128, 128), QuantSpec(block=(1, 128))),
        ((1, 128, 128), QuantSpec("e2m1", (1, 32))),
    ],
)
def test_other_blocks_are_left_to_the_general_kernels(shape: tuple[int, ...], spec: QuantSpec) -> None:
    assert not FUSED["stacks"].covers(torch.ones(shape), spec)
