"""Sampling from logits."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.sampling import (
    SamplingParams,
    filter_probs,
    request_uniforms,
    sample_tokens,
    token_logprobs,
)


def test_samples_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    uniforms = request_uniforms(7, [0], count)[0]
    drawn = sample_tokens(probs.log().expand(count, 4), uniforms, SamplingParams(1))
    shares = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.01)  # three standard errors of a share are 0.0106


def test_temperature_sharpens():
    logits = torch.tensor([[1.0, 0.0]]).expand(20_000, 2)
    uniforms = request_uniforms(1, [0], 20_000)[0]
    hot = sample_tokens(logits, uniforms, SamplingParams(1)).float().mean()
    cold = sample_tokens(logits, uniforms, SamplingParams(1, temperature=0.5)).float().mean()
    assert hot == pytest.approx(1 / (1 + 2.71828), abs=0.01)
    assert cold == pytest.approx(1 / (1 + 2.71828**2), abs=0.01)


def test_greedy_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert sample_tokens(logits, torch.tensor([0.99, 0.99]), SamplingParams(1, temperature=0.0)).tolist() == [1, 0]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probs = torch.tensor([[0.1, 0.5, 0.3, 0.1]], dtype=torch.float64)
    kept = filter_probs(probs, SamplingParams(1, top_p=0.7))
    torch.testing.assert_close(kept, torch.tensor([[0.0, 0.625, 0.375, 0.0]], dtype=torch.float64))
    only_the_first = filter_probs(probs, SamplingParams(1, top_p=0.5))
    torch.testing.assert_close(only_the_first, torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64))


def test_top_k_keeps_k():
    probs = torch.tensor([[0.1, 0.5, 0.3, 0.1]], dtype=torch.float64)
    kept = filter_probs(probs, SamplingParams(1, top_k=2))
    torch.testing.assert_close(kept, torch.tensor([[0.0, 0.625, 0.375, 0.0]], dtype=torch.float64))


def test_a_token_of_probability_zero_is_never_picked():
    """A uniform of exactly 0 used to be able to land on a leading zero-probability token."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]]).expand(3, 4)
    assert sample_tokens(logits, torch.tensor([0.0, 0.5, 1 - 1e-16]), SamplingParams(1)).tolist() == [1, 3, 3]


def test_draws_depend_on_seed_and_request_alone():
    together = request_uniforms(5, [0, 1, 2], 8)
    assert torch.equal(together[1:2], request_uniforms(5, [1], 8))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, request_uniforms(6, [0, 1, 2], 8))


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.bfloat16)
    expected = 2.0 - torch.tensor([1.0, 2.0, 0.5]).logsumexp(0)
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([1])), expected.reshape(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**{"max_new_tokens": 4, **settings})
