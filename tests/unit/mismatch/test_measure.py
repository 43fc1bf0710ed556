"""Distances against the published fixture and hand-made cases; intervals against their definition."""

import math

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.measure import by_position, compare, worst_tokens


def test_fixture_of_the_metrics_table() -> None:
    """r, t and mask with k1 0.0666667, k3 0.0095797, probs diff 0.0530624."""
    r = torch.tensor([[-1.0, -2.0, -0.5, 0.0]])
    t = torch.tensor([[-1.1, -1.9, -0.7, 0.0]])
    found = compare(r, t, torch.tensor([[1, 1, 1, 0]]), torch.tensor([0]))
    assert found.k1.mean == pytest.approx(0.0666667, abs=1e-7)
    assert found.k3.mean == pytest.approx(0.0095797, abs=1e-7)
    assert found.prob_diff.mean == pytest.approx(0.0530624, abs=1e-7)
    assert found.largest == pytest.approx(0.2, abs=1e-6)
    assert (found.tokens, found.prompts) == (3, 1)
    assert found.k1.low == found.k1.high == found.k1.mean  # one prompt: nothing to resample


def test_intervals_resample_prompts_not_tokens() -> None:
    """Sixteen copies of a response are one prompt: the interval must not shrink as if they were sixteen."""
    generator = torch.Generator().manual_seed(0)
    r = -torch.rand(40, 10, generator=generator) - 0.1
    t = (r + 0.1 * torch.randn(40, 1, generator=generator)).clamp(max=0.0)
    mask = torch.ones(40, 10)
    once = compare(r, t, mask, torch.arange(40))
    copies = compare(r.repeat(16, 1), t.repeat(16, 1), mask.repeat(16, 1), torch.arange(40).repeat(16))
    assert copies.k1.mean == pytest.approx(once.k1.mean)
    assert copies.k1.high - copies.k1.low == pytest.approx(once.k1.high - once.k1.low)
    naive = compare(r.repeat(16, 1), t.repeat(16, 1), mask.repeat(16, 1), torch.arange(640))
    assert naive.k1.high - naive.k1.low < 0.5 * (once.k1.high - once.k1.low)


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    """k1 of prompts with a known mean distance of 0.05; 88 to 100 of 100 (96 measured)."""
    held = 0
    for trial in range(100):
        generator = torch.Generator().manual_seed(trial)
        shift = 0.05 + 0.02 * torch.randn(60, 1, generator=generator)
        r = torch.full((60, 8), -1.0)
        found = compare(r, r - shift, torch.ones(60, 8), torch.arange(60), seed=trial)
        held += found.k1.low <= 0.05 <= found.k1.high
    assert 88 <= held <= 100


@pytest.mark.parametrize(("bad", "value"), [("rollout", float("nan")), ("training", 0.3), ("training", -float("inf"))])
def test_a_logprob_that_is_none_is_named(bad: str, value: float) -> None:
    tensors = {"rollout": torch.full((2, 3), -1.0), "training": torch.full((2, 3), -1.0)}
    tensors[bad][1, 2] = value
    with pytest.raises(UserError, match=f"{bad} logprob of token 2 of sequence 1"):
        compare(tensors["rollout"], tensors["training"], torch.ones(2, 3), torch.arange(2))
    masked = torch.ones(2, 3)
    masked[1, 2] = 0
    compare(tensors["rollout"], tensors["training"], masked, torch.arange(2))


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(UserError, match="no token counts"):
        compare(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    with pytest.raises(UserError, match="differ"):
        compare(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))


def test_distance_over_positions() -> None:
    r = torch.full((2, 8), -1.0)
    t = r - torch.arange(8) * 0.01
    mask = torch.ones(2, 8)
    mask[:, 6:] = 0
    rows = by_position(r, t, mask, bins=3)
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(0, 1, 4), (2, 3, 4), (4, 5, 4)]
    assert rows[0]["k3"] < rows[1]["k3"] < rows[2]["k3"]


def test_worst_tokens_are_named_farthest_first() -> None:
    ids, start = torch.tensor([[5, 6, 7, 8], [5, 9, 3, 0]]), torch.tensor([2, 1])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    rollout = torch.tensor([[0.0, 0.0, -1.0, -1.0], [0.0, -3.0, -1.0, -9.0]])
    trainer = torch.tensor([[0.0, 0.0, -1.0, -1.5], [0.0, -1.0, -1.0, 0.0]])
    found = worst_tokens(ids, start, mask, rollout=rollout, trainer=trainer, prefill=trainer + 0.25)
    assert [(row["sequence"], row["prompt_tokens"], row["position"], row["token"]) for row in found] == [
        (1, 1, 0, 9),
        (0, 2, 1, 8),
    ]
    assert found[0]["k3"] == pytest.approx(math.exp(2) - 1 - 2)
    assert (found[0]["rollout"], found[0]["trainer"], found[0]["prefill"]) == (-3.0, -1.0, -0.75)
    assert worst_tokens(ids, start, mask, rollout=rollout, trainer=rollout) == []
