"""The chunked head computes what the whole one does, and never holds the logits of all positions."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.token_logprobs import (
    AUTOMODEL_HEAD,
    BF16_HEAD,
    chunked_token_logprobs,
    head_logits,
    install_scoring_head,
    scoring,
    token_logprobs,
)

VOCAB, HIDDEN, TOKENS = 1000, 64, 77


def operands(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / 8).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 16, 77, 500])
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.float32, AUTOMODEL_HEAD), (torch.bfloat16, AUTOMODEL_HEAD), (torch.bfloat16, BF16_HEAD)],
)
def test_values_and_gradients_are_those_of_the_whole_head(dtype, numerics, chunk_size):
    hidden, weight, targets, seed_grad = operands(dtype)
    whole = token_logprobs(head_logits(hidden, weight, numerics), targets)
    expected = torch.autograd.grad(whole, (hidden, weight), seed_grad)
    chunked = chunked_token_logprobs(hidden, weight, targets, chunk_size=chunk_size, numerics=numerics)
    found = torch.autograd.grad(chunked, (hidden, weight), seed_grad)
    # A product's rounding depends on its number of rows. Measured maxima: 1e-6 in float32, 1.5e-4 where a BF16 logit
    # flips; gradients 5e-7 relative in float32, 5e-5 with BF16 logits. A BF16 product rounds the whole head's weight
    # gradient to BF16 once more than chunks do, whose sum is float32: 2.4e-3.
    torch.testing.assert_close(chunked, whole, rtol=0, atol=2e-6 if dtype == torch.float32 else 5e-4)
    limit = 2e-6 if dtype == torch.float32 else 2e-4 if numerics == AUTOMODEL_HEAD else 5e-3
    for value, reference in zip(found, expected, strict=True):
        assert value.dtype == reference.dtype
        assert (value - reference).float().norm() / reference.float().norm() < limit


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, seed_grad = operands(torch.float32)
    logprobs = chunked_token_logprobs(hidden, weight.detach(), targets, chunk_size=16)
    logprobs.backward(seed_grad)
    assert hidden.grad is not None and weight.grad is None


def test_logits_that_bf16_rounds_are_rounded():
    """AutoModel returns BF16 logits of a BF16 model although it multiplies in float32."""
    hidden, weight, targets, _ = operands(torch.bfloat16)
    exact = token_logprobs(hidden.float() @ weight.t(), targets)
    chunked = chunked_token_logprobs(hidden, weight, targets, chunk_size=16)
    assert (chunked - exact).abs().max() > 1e-3


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that an operation's floating-point output had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.fixture(scope="module")
def wide_model(config_once):
    """The tiny model with a vocabulary that dwarfs everything else."""
    config = {**config_once, "vocab_size": 20_000, "num_hidden_layers": 2, "compress_ratios": [0, 4]}
    return build_model(automodel_config(config), seed=0)


@pytest.mark.parametrize("chunk_size", [16, None])
def test_no_tensor_has_the_size_of_all_logits(wide_model, chunk_size):
    """Forward and backward of the whole model; without chunks the logits are there, so that the test can fail."""
    install_scoring_head(wide_model, chunk_size=chunk_size)
    ids = torch.randint(0, 20_000, (2, 160), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest, scoring(wide_model, ids):
        wide_model(ids).logits.sum().backward()
    wide_model.zero_grad()
    logits, weight = ids.numel() * 20_000, 20_000 * HIDDEN * 2
    assert largest.elements == (logits if chunk_size is None else weight)


def test_outside_of_scoring_the_model_returns_logits(wide_model):
    install_scoring_head(wide_model, chunk_size=16)
    ids = torch.randint(0, 20_000, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = wide_model(ids).logits
        with scoring(wide_model, ids):
            scored = wide_model(ids).logits
    assert logits.shape == (1, 24, 20_000)
    torch.testing.assert_close(scored, token_logprobs(logits, ids), rtol=0, atol=2e-6)
