"""Hyper-connection arithmetic: values, gradients, TF32 and the norm, and the fused kernels against them."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.numerics import NumericsError
from nemo_rl_dsv4.numerics.hyper_connections import (
    mix_streams,
    mix_streams_backward,
    mix_streams_forward,
    norm_from_squares,
    tf32_values,
    tf32_weight,
)

from . import interpreted


def inputs(width: int = 96, dtype: torch.dtype = torch.bfloat16, count: int = 4) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(width)
    post = torch.rand(2, 5, count, generator=g) * 2
    comb = torch.softmax(torch.randn(2, 5, count, count, generator=g), -1)
    out = torch.randn(2, 5, width, generator=g).to(dtype)
    streams = (torch.randn(2, 5, count, width, generator=g) * 3).to(dtype)
    return post, comb, out, streams


def test_mixing_is_the_formula_rounded_once():
    post, comb, out, streams = inputs()
    exact = post[..., None].double() * out[..., None, :].double() + comb.double().transpose(-1, -2) @ streams.double()
    got = mix_streams(post, comb, out, streams)
    assert got.dtype == torch.bfloat16
    assert float((got != exact.to(torch.bfloat16)).double().mean()) < 2e-3  # sums of float32 at a rounding boundary
    cast_early = post.bfloat16()[..., None] * out[..., None, :] + comb.bfloat16().transpose(-1, -2) @ streams
    assert float((cast_early != got).double().mean()) > 0.1


def test_mixing_gradients_are_autograds():
    leaves = [t.double().requires_grad_() for t in inputs(16, torch.float32)]
    post, comb, out, streams = leaves
    y = post[..., None] * out[..., None, :] + comb.transpose(-1, -2) @ streams
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(grad)
    plain = [t.detach().float() for t in leaves]
    tracked = [t.clone().requires_grad_() for t in plain]
    mix_streams(*tracked).backward(grad.float())
    for found, wanted in zip(tracked, leaves, strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)
    dtypes = [t.dtype for t in mix_streams_backward(grad.bfloat16(), *plain[:2], *(t.bfloat16() for t in plain[2:]))]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


def test_mixing_refuses_what_does_not_fit():
    post, comb, out, streams = inputs()
    with pytest.raises(NumericsError, match=r"post, comb and out are \[2, 5, 3\].*wanted \[2, 5, 4\]"):
        mix_streams(post[..., :3], comb, out, streams)
    with pytest.raises(NumericsError, match="post is torch.bfloat16.*float32 coefficients"):
        mix_streams(post.bfloat16(), comb, out, streams)
    with pytest.raises(NumericsError, match="out is torch.float32 and streams torch.bfloat16"):
        mix_streams(post, comb, out.float(), streams)


def test_tf32_values():
    one, ulp = 1.0, 2.0**-10
    ties = {one + ulp / 2: one, one + 3 * ulp / 2: one + 2 * ulp, -one - ulp / 2: -one, 2 - ulp / 2: 2.0}  # to even
    others = {one: one, one + ulp: one + ulp, one + ulp * 0.49: one, 0.0: 0.0, float("inf"): float("inf")}
    assert tf32_values(torch.tensor([*ties, *others])).tolist() == [*ties.values(), *others.values()]
    assert abs(float(tf32_values(torch.tensor([3e-39]))) / 3e-39 - 1) < 2e-3  # subnormal: fewer bits
    assert tf32_values(torch.tensor([float("nan")])).isnan().all()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    assert float((tf32_values(x) / x - 1).abs().max()) <= 2.0**-11
    assert torch.equal(tf32_values(tf32_values(x)), tf32_values(x))


def test_tf32_weights_pass_their_gradient_and_the_sum_of_repeated_streams():
    weight = torch.randn(3, 4 * 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.equal(tf32_weight(weight), tf32_values(weight))
    x = torch.randn(8, generator=torch.Generator().manual_seed(4))
    total = weight.detach().view(3, 4, 8).sum(1)
    torch.testing.assert_close(tf32_weight(weight, 4) @ x.repeat(4), tf32_values(total) @ x, rtol=2e-6, atol=2e-6)
    assert float((tf32_weight(weight, 4) - weight).detach().abs().max()) > 0
    tf32_weight(weight, 4).square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * tf32_weight(weight, 4).detach())
    with pytest.raises(NumericsError, match=r"float32 \[3, 32\]; wanted float32 with a multiple of 5 columns"):
        tf32_weight(weight, 5)


def test_norm_by_a_given_mean_square():
    g = torch.Generator().manual_seed(5)
    wide = torch.randn(4, 64, generator=g) * 3
    weight = (torch.rand(64, generator=g) + 0.5).requires_grad_()
    x = wide.bfloat16().requires_grad_()
    square = wide.square().mean(-1, keepdim=True)
    y = norm_from_squares(x, square, weight, 1e-6)
    wanted = (x.detach().double() * torch.rsqrt(square.double() + 1e-6) * weight.detach().double()).bfloat16()
    assert y.dtype == torch.bfloat16 and float((y != wanted).double().mean()) < 0.01
    grad = torch.randn(y.shape, generator=g)
    y.backward(grad.bfloat16())
    leaf, scale = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    torch.nn.functional.rms_norm(leaf, (64,), scale, 1e-6).backward(grad.bfloat16().double())
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.grad.double(), scale.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "count"), [(96, 4), (64, 2)])
def test_fused_mixing(width: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    fused = interpreted.load()
    shape = fused["shapes"].Shape
    for name in ("mix_streams", "mix_streams_backward"):
        monkeypatch.setitem(fused["shapes"].SHAPES, name, shape(32 * count, 4))  # several blocks, the last one partial
    post, comb, out, streams = inputs(width, dtype, count)
    comb = comb.transpose(-1, -2).contiguous().transpose(-1, -2)
    kernels = fused["hyper_connections"]
    wanted = mix_streams_forward(post, comb, out, streams)
    got = kernels.mix_streams_forward(post, comb, out, streams)
    assert float((got != wanted).double().mean()) < (1.0 if dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(got, wanted, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
    grad = torch.randn(streams.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    for found, expected in zip(
        kernels.mix_streams_backward(grad, post, comb, out, streams),
        mix_streams_backward(grad, post, comb, out, streams),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5 if found.dtype == torch.float32 else 8e-3, atol=1e-4)
