"""FP8 products of a real GPU against their emulation."""

import pytest
import torch

from nemo_rl_dsv4.model import fp8_gemm
from nemo_rl_dsv4.model.fp8_gemm import scaled_grouped_mm, scaled_linear, weight_handle, why_emulated
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec, dequantize, get_profile, quantize
from nemo_rl_dsv4.numerics.blockwise import reference_dequantize, reference_quantize

HOPPER = get_profile("vllm-hopper")
INPUT, WEIGHT = HOPPER.site("linear.input"), HOPPER.site("linear.weight")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def randn(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def needs_scaled_mm():
    reason = why_emulated(torch.device("cuda"), INPUT, 128)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("columns", [128, 4096])
@pytest.mark.parametrize("spec", [INPUT, QuantSpec("e4m3fn", (1, 128), "float32", amax_floor=1e-10)], ids=repr)
def test_group_bytes_are_those_of_the_reference(columns, spec):
    x = randn(77, columns) * torch.logspace(-6, 4, 77, device="cuda", dtype=torch.float32)[:, None].bfloat16()
    found, wanted = quantize(x, spec), reference_quantize(x, spec)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(dequantize(found, torch.bfloat16), reference_dequantize(wanted, torch.bfloat16))


def check_against_emulation(monkeypatch, run, tensors):
    """Outputs within one BF16 step of the emulation's; gradients, which share the code, equal."""
    results = []
    for emulated in (False, True):
        if emulated:
            monkeypatch.setattr(fp8_gemm, "why_emulated", lambda *_: "asked for")
        out = run()
        results.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    (out, *grads), (expected, *expected_grads) = results
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4e-3, float(error)  # BF16 rounding alone gives 1.7e-3 where sums fall near a tie
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 5, 127, 130, 1000])
@pytest.mark.parametrize(
    ("inner", "outer", "groups"), [(4096, 1024, 1), (1024, 512, 1), (640, 384, 1), (4096, 2048, 2)]
)
def test_scaled_linear(monkeypatch, tokens, inner, outer, groups):
    needs_scaled_mm()
    weight = torch.nn.Parameter(randn(outer, inner, seed=1))
    x = randn(*((tokens, groups, inner) if groups > 1 else (tokens, inner))).requires_grad_()
    stored = WeightRounding(WEIGHT, keep_values=False).quantized(weight)
    check_against_emulation(monkeypatch, lambda: scaled_linear(x, weight, stored, INPUT, groups=groups), (x, weight))


@pytest.mark.parametrize("counts", [(5, 0, 131, 2), (0, 0, 0, 16), (256, 256, 256, 256)])
def test_scaled_experts(monkeypatch, counts):
    needs_scaled_mm()
    weight = torch.nn.Parameter(randn(4, 512, 2 * 256, seed=1))
    stored = WeightRounding(WEIGHT, 2, keep_values=False, transposed=True).quantized(weight)
    x = randn(sum(counts), 512).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    check_against_emulation(
        monkeypatch, lambda: scaled_grouped_mm(x, weight_handle(weight, x.dtype), ends, stored, INPUT), (x, weight)
    )
