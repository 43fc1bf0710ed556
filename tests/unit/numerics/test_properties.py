"""What holds for every input: properties, memory, and the same bits under compilation and recomputation."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nemo_rl_dsv4.numerics import QuantSpec, dequantize, fake_quant, get_profile, quantize, tiling
from nemo_rl_dsv4.numerics.blockwise import Quantized

GROUP = QuantSpec(block=(1, 16))
FORMATS = st.sampled_from(["e4m3fn", "e4m3fnuz", "e2m1"])
# any float32 but NaN and Inf, with exponents far apart in one block
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCKS = st.lists(NUMBERS, min_size=16, max_size=16)


def codes_of(q: Quantized) -> torch.Tensor:
    return q.data.view(torch.uint8)


@settings(max_examples=100, deadline=None)
@given(BLOCKS, FORMATS)
def test_quantizing_a_dequantized_block_changes_nothing(values: list[float], fmt: str) -> None:
    """Same values always. Same bytes too, unless the largest value was rounded down to max/2 * scale, where the next
    smaller scale fits: then the scale halves once and stays."""
    spec = QuantSpec(fmt, (1, 16))
    x = torch.tensor([values])
    first = quantize(x, spec)
    again = quantize(dequantize(first, torch.float32), spec)
    if dequantize(first, torch.float32).abs().max() == torch.finfo(torch.float32).max:
        return  # saturated at the largest float32: that value is not on the grid
    assert torch.equal(dequantize(again, torch.float32), dequantize(first, torch.float32))
    halved = again.scale.item() == first.scale.item() / 2
    if halved:
        assert dequantize(first, torch.float32).abs().max() == spec.max_value / 2 * first.scale.item()
        third = quantize(dequantize(again, torch.float32), spec)
        assert torch.equal(third.scale, again.scale) and torch.equal(codes_of(third), codes_of(again))
    elif first.data.any() if fmt == "e2m1" else codes_of(first).any():
        nonzero = codes_of(first) & 0x7F != 0  # a block of zeros has no scale of its own
        if nonzero.any() and (fmt != "e4m3fnuz" or first.scale.item() > 2.0**-126):
            assert torch.equal(again.scale, first.scale)
            assert torch.equal(codes_of(again), codes_of(first))


@settings(max_examples=100, deadline=None)
@given(BLOCKS, FORMATS, st.sampled_from(["ue8m0", "float32"]))
def test_rounding_is_monotone_odd_and_within_half_a_step(values: list[float], fmt: str, scale: str) -> None:
    spec = QuantSpec(fmt, (1, 16), scale)
    x = torch.tensor([sorted(values)])
    y = fake_quant(x, spec)
    assert (y.diff() >= 0).all()
    assert torch.equal(fake_quant(-x, spec), -y)
    assert y.isfinite().all()


@settings(max_examples=100, deadline=None)
@given(BLOCKS, FORMATS)
def test_the_scale_is_the_smallest_power_of_two_that_fits(values: list[float], fmt: str) -> None:
    spec = QuantSpec(fmt, (1, 16))
    amax = max(abs(v) for v in values)
    scale = quantize(torch.tensor([values]), spec).scale.item()
    assert math.frexp(scale)[0] == 0.5
    if amax == 0.0:
        assert scale == 1.0
    else:
        assert amax <= spec.max_value * scale
        assert scale == 2.0**-126 or amax > spec.max_value * scale / 2


class _PeakFloat32(TorchDispatchMode):
    """Highest number of float32 elements alive at once in storages made under the mode."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            storage = out.untyped_storage()
            if storage._cdata not in self.known:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() // 4)
                self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
                self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 512), (4, 256, 512)])
def test_work_memory_is_two_float32_copies_of_a_block_row(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A 4 GB tensor must not need a second 4 GB: with chunks of one block row, two of them are alive at the peak."""
    block_row = 128 * 512
    monkeypatch.setattr(tiling, "CHUNK_ELEMENTS", block_row)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with _PeakFloat32(x) as watch:
        quantize(x, QuantSpec())
    grid = x.numel() // 128**2
    assert block_row <= watch.peak <= 2 * block_row + 16 * grid


def test_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 150, 80, generator=torch.Generator().manual_seed(1))
    whole = [(quantize(x, spec), fake_quant(x, spec)) for spec in (QuantSpec(), GROUP, QuantSpec("e2m1", (1, 32)))]
    monkeypatch.setattr(tiling, "CHUNK_ELEMENTS", 3000)
    for q, y in whole:
        again = quantize(x, q.spec)
        assert torch.equal(again.scale, q.scale) and torch.equal(codes_of(again), codes_of(q))
        assert torch.equal(fake_quant(x, q.spec), y)
        assert torch.equal(dequantize(again, torch.float32), y)


def test_compiled_code_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole (fullgraph) by dynamo and AOT autograd; code generation itself is checked where a compiler is."""
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    specs = [get_profile("vllm-hopper").site(site) for site in ("linear.weight", "linear.input", "kv.swa")]
    assert None not in specs

    def every_site(v: torch.Tensor) -> torch.Tensor:
        return torch.stack([fake_quant(v, spec) * 2.0 for spec in specs if spec])

    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(2), requires_grad=True)
    y = torch.compile(every_site, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y.detach(), every_site(x.detach()))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 6.0))
    torch._dynamo.reset()


def test_recomputation_has_the_same_bits() -> None:
    spec = get_profile("vllm-hopper").site("linear.input")
    assert spec is not None
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))

    def layer(v: torch.Tensor) -> torch.Tensor:
        return fake_quant(torch.tanh(fake_quant(v, spec) @ fake_quant(weight, QuantSpec())), spec)

    plain, recomputed = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(plain).square().sum().backward()
    out = checkpoint(layer, recomputed, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    out.square().sum().backward()
    assert torch.equal(plain.grad, recomputed.grad)
