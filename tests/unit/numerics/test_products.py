"""Products with float32 sums: what they are on a CPU, the gradients of their GPU path, and the TF32 kernel."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nemo_rl_dsv4.numerics import products
from nemo_rl_dsv4.numerics.hyper_connections import tf32_values

from . import interpreted


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_cpu_multiplies_in_float32() -> None:
    q, k, x, w = values(2, 4, 5, 16), values(2, 1, 7, 16, seed=1), values(2, 5, 16), values(6, 16, seed=2)
    assert torch.equal(products.bf16_scores(q, k), q.float() @ k.float().transpose(2, 3))
    assert torch.equal(products.bf16_linear(x, w, torch.ones(6)), F.linear(x.float(), w.float(), torch.ones(6)))
    assert torch.equal(products.tf32_linear(x.float(), w.float()), F.linear(x.float(), w.float()))


@pytest.mark.parametrize("key_heads", [1, 4])
def test_gradients_of_the_path_that_gpus_take(monkeypatch: pytest.MonkeyPatch, key_heads: int) -> None:
    """The same values on a CPU; sums of a product are taken in another order there."""
    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    q, k = values(2, 4, 5, 16), values(2, key_heads, 7, 16, seed=1)
    x, w, f = values(2, 5, 16), values(6, 16, seed=2), tf32_values(values(6, 16, seed=3, dtype=torch.float32))
    grads = []
    for fast in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, x, w, f)]
        a, b, c, d, e = leaves
        if fast:
            outs = (products.bf16_scores(a, b), products.bf16_linear(c, d), products.tf32_linear(c.float(), e))
        else:
            linear = F.linear(c.float(), d.float()), F.linear(c.float(), e)
            outs = (torch.matmul(a.float(), b.float().transpose(2, 3)), *linear)
        assert all(out.dtype == torch.float32 for out in outs)
        grads.append((*outs, *torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)))
    for found, wanted in zip(*grads, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_tensor_cores_can_be_left_out() -> None:
    before = products._enabled
    with pytest.raises(KeyError), products.without_tensor_cores():
        assert not products._enabled
        raise KeyError
    assert products._enabled is before is True
    with products.without_tensor_cores():
        with products.without_tensor_cores():
            pass
        assert not products._enabled


def test_a_bias_and_heads_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    x, w, bias = values(5, 16), values(6, 16, seed=2), values(6, seed=3)
    torch.testing.assert_close(products.bf16_linear(x, w, bias), F.linear(x.float(), w.float(), bias.float()))
    assert products.bf16_linear(x[:0], w, bias).shape == (0, 6)
    with pytest.raises(ValueError, match="2 heads of keys for 4 heads of queries; wanted 1 or 4"):
        products.bf16_scores(values(1, 4, 3, 16), values(1, 2, 3, 16))


@pytest.fixture(scope="module")
def tf32() -> ModuleType:
    return interpreted.load()["tf32"]


@pytest.mark.parametrize(("rows", "columns", "n", "split"), [(70, 640, 24, 256), (3, 64, 35, 64), (64, 100, 5, 128)])
def test_the_kernel_adds_parts_of_any_shape(tf32: ModuleType, rows: int, columns: int, n: int, split: int) -> None:
    x, w = values(rows, columns), tf32_values(values(n, columns, seed=1, dtype=torch.float32))
    found = tf32.tf32_product(x, w, split)
    torch.testing.assert_close(found, (x.double() @ w.double().t()).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(tf32.tf32_product(x.t().contiguous().t(), w, split), found)


def test_the_kernel_refuses_parts_that_it_cannot_walk(tf32: ModuleType) -> None:
    with pytest.raises(ValueError, match="parts of 100 columns; wanted a multiple of 64"):
        tf32.tf32_product(values(4, 128), values(24, 128, dtype=torch.float32), 100)
