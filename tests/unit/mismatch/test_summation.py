"""Products as another order of additions could have given them."""

import pytest
import torch

from nemo_rl_dsv4.mismatch import summation
from nemo_rl_dsv4.mismatch.summation import OtherSums
from nemo_rl_dsv4.numerics import products


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 512, generator=generator) for size in (256, 1024))
    x[:, :64] *= 0  # zero products as well
    w[:8, 64:] = 0
    return x, w


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_drawn_remainder_alone_changes_nothing(operands, dtype) -> None:
    """It lies inside the rounding boundaries, also below powers of two, where they are half as far, and at zero."""
    x, w = (t.to(dtype) for t in operands)
    exact = torch.nn.functional.linear(x, w)
    with OtherSums(0.0):
        assert torch.equal(torch.nn.functional.linear(x, w), exact)
    assert bool((exact == 0).any()) and bool((torch.frexp(exact.float()).mantissa.abs() == 0.5).any())


def test_bf16_outputs_change_as_often_as_another_order_of_additions_changes_them(operands) -> None:
    """The other order here: the same terms permuted, summed in float32 blocks, then rounded."""
    x, w = (t.to(torch.bfloat16) for t in operands)
    exact = torch.nn.functional.linear(x, w)
    with OtherSums():
        moved = torch.nn.functional.linear(x, w)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    blocks = zip(x[:, order].float().split(32, 1), w[:, order].float().split(32, 1), strict=True)
    permuted = sum((a @ b.T for a, b in blocks), torch.zeros(256, 1024)).to(torch.bfloat16)
    changed = [float((other != exact).float().mean()) for other in (moved, permuted)]
    assert 1e-5 < changed[0] < 1e-3
    assert 0.2 < changed[0] / changed[1] < 5
    with OtherSums(1e-5):
        moved = torch.nn.functional.linear(x, w)
    neighbours = (moved.view(torch.int16).int() - exact.view(torch.int16).int()).abs()[exact.abs() > 1]
    assert int(neighbours.max()) == 1


def test_float32_outputs_get_an_error_of_the_size_and_each_seed_its_own(operands) -> None:
    x, w = operands
    exact = x @ w.T
    results = []
    for seed in (0, 0, 1):
        with OtherSums(1e-6, seed=seed):
            results.append(x @ w.T)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    error = (results[0] - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.9e-6 < float(error) < 1.1e-6


def test_parts_of_an_output_are_moved_like_the_whole(operands, monkeypatch) -> None:
    """Attention logits of a long batch: the draws for all of them at once took several times their memory."""
    x, w = operands
    exact = torch.bmm(x.view(4, 64, 512), w.view(4, 256, 512).transpose(1, 2))
    monkeypatch.setattr(summation, "_PART", 1000)
    with OtherSums(1e-6):
        moved = torch.bmm(x.view(4, 64, 512), w.view(4, 256, 512).transpose(1, 2))
    assert moved.shape == exact.shape and bool((moved[exact == 0] == 0).all())
    error = (moved - exact).square().mean(dim=(1, 2)).sqrt() / exact.square().mean().sqrt()
    assert bool(((error > 0.8e-6) & (error < 1.2e-6)).all())  # of the whole output's size, everywhere


def test_nothing_else_is_touched(operands) -> None:
    x, _ = operands
    with OtherSums(1.0):
        assert torch.equal(x + x, 2 * x)
        assert torch.equal(
            torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64), torch.full((2, 2), 2)
        )


def test_products_of_gpus_are_moved_as_well(operands, monkeypatch) -> None:
    """TF32 products are no operators of torch's own; BF16 ones with float32 results have names of their own there."""
    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    x, w = (t.bfloat16().float() for t in operands)
    for product in (products.tf32_linear, products.bf16_linear):
        exact = product(x, w)
        with OtherSums():
            moved = product(x, w)
        error = (moved - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert 0.5e-7 < float(error) < 2e-7
    assert {torch.ops.aten.mm.dtype, torch.ops.aten.bmm.dtype} < summation._PRODUCTS
