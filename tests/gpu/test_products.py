"""Products on tensor cores of a real GPU: against float64, and that they are what the trainer's seams take."""

import pytest
import torch

from nemo_rl_dsv4.numerics.hyper_connections import tf32_values
from nemo_rl_dsv4.numerics.products import bf16_linear, bf16_scores, on_tensor_cores, tf32_linear, without_tensor_cores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_products_and_their_gradients() -> None:
    q, k, x, w = values(2, 64, 70, 512), values(2, 1, 90, 512, seed=1), values(2, 70, 2048), values(40, 2048, seed=2)
    f = tf32_values(values(24, 2048, seed=3).float() * 1.01)
    leaves = [t.clone().requires_grad_() for t in (q, k, x, w, f)]
    a, b, c, d, e = leaves
    found = (bf16_scores(a, b), bf16_linear(c, d), tf32_linear(c.float(), e))
    wide = [t.double().requires_grad_() for t in (q, k, x, w, f)]
    wanted = (wide[0] @ wide[1].transpose(2, 3), wide[2] @ wide[3].t(), wide[2] @ wide[4].t())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32 and error(one, other.detach()) < 1e-5
    torch.autograd.backward([out.sum() for out in found])
    torch.autograd.backward([out.sum() for out in wanted])
    for one, other in zip(leaves, wide, strict=True):
        assert one.grad is not None and other.grad is not None
        assert error(one.grad, other.grad) < (1e-5 if one.dtype == torch.float32 else 4e-3)


def test_parts_of_a_tf32_sum_start_afresh() -> None:
    """One part after another: a sum of 64 parts is the sum of what each gives by itself, in order."""
    x, f = values(70, 16384), tf32_values(values(24, 16384, seed=1).float() * 1.01)
    total = torch.zeros(70, 24, device="cuda")
    for part, weight in zip(x.split(256, 1), f.split(256, 1), strict=True):
        total = total + tf32_linear(part.float(), weight)
    assert torch.equal(tf32_linear(x.float(), f), total)


def test_they_can_be_left_out() -> None:
    x, w = values(70, 2048), values(40, 2048, seed=2)
    assert on_tensor_cores(x)
    with without_tensor_cores():
        assert not on_tensor_cores(x)
        assert torch.equal(bf16_linear(x, w), torch.nn.functional.linear(x.float(), w.float()))
