import math

import pytest
import torch

from nemo_rl_dsv4.grpo import metrics
from nemo_rl_dsv4.grpo.metrics import combine_micro_batches, mismatch_metrics, scale_for_updates

ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5, 0.0]])
TRAIN = torch.tensor([[-1.1, -1.9, -0.7, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0]])


def test_fixture_values():
    """The published three-token fixture: k1, k3 and mean probability difference."""
    found = mismatch_metrics(TRAIN, ROLLOUT, MASK, 3)
    assert found["rollout_corr/kl"].item() == pytest.approx(0.0666667, abs=1e-6)
    assert found["gen_kl_error"].item() == pytest.approx(0.0095797, abs=1e-6)
    assert found["training/rollout_probs_diff_mean"].item() == pytest.approx(0.0530624, abs=1e-6)


def test_other_metrics_by_hand():
    """Each remaining metric against plain math on the fixture's three tokens."""
    pairs = [(-1.1, -1.0), (-1.9, -2.0), (-0.7, -0.5)]
    found = mismatch_metrics(TRAIN, ROLLOUT, MASK, 3)
    assert found["token_mult_prob_error"].item() == pytest.approx(
        sum(math.exp(abs(r - t)) for t, r in pairs) / 3, abs=1e-6
    )
    assert found["policy_kl_error"].item() == pytest.approx(
        sum(math.exp(r - t) - 1 - (r - t) for t, r in pairs) / 3, abs=1e-6
    )
    js = 0.0
    for t, r in pairs:
        m = math.log(0.5 * math.exp(t) + 0.5 * math.exp(r))
        js += 0.5 * (math.exp(t - m) - 1 - (t - m)) + 0.5 * (math.exp(r - m) - 1 - (r - m))
    assert found["js_divergence_error"].item() == pytest.approx(js / 3, abs=1e-6)
    largest = max(abs(math.exp(t) - math.exp(r)) for t, r in pairs)
    assert found["training/rollout_probs_diff_max"].item() == pytest.approx(largest, abs=1e-6)


def test_entropy_estimate_is_the_entropy_in_expectation():
    """Averaged over the rollout distribution, -(p_curr / p_roll) log p_curr is the entropy of p_curr."""
    roll = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    curr = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    estimate = (roll * metrics.entropy_estimate(curr.log(), roll.log())).sum()
    assert estimate.item() == pytest.approx(-(curr * curr.log()).sum().item(), abs=1e-12)


def test_k3_estimates_kl_in_expectation():
    """Averaged over the rollout distribution, k1 and k3 both give KL(rollout || training)."""
    roll = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    train = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    exact = (roll * (roll.log() - train.log())).sum().item()
    for estimator in (metrics.rollout_train_k1, metrics.rollout_train_k3):
        assert (roll * estimator(train.log(), roll.log())).sum().item() == pytest.approx(exact, abs=1e-12)


def test_k3_of_nearly_equal_probabilities_does_not_cancel():
    """A log ratio of 2^-20 has k3 = 2^-41; float32 exp(d) - 1 - d would return 0 or rounding noise."""
    t = torch.full((1, 4), -1.0)
    r = t + 2.0**-20
    found = mismatch_metrics(t, r, torch.ones(1, 4), 4)["gen_kl_error"].item()
    assert found == pytest.approx(2.0**-41, rel=1e-3)


def test_masked_garbage_does_not_reach_a_metric():
    """inf and NaN under the mask (padding of an engine that writes them) leave every metric as it was."""
    clean = mismatch_metrics(TRAIN, ROLLOUT, MASK, 3)
    dirty_train, dirty_rollout = TRAIN.clone(), ROLLOUT.clone()
    dirty_train[0, 3], dirty_rollout[0, 3] = float("nan"), float("-inf")
    dirty = mismatch_metrics(dirty_train, dirty_rollout, MASK, 3)
    assert {name: value.item() for name, value in clean.items()} == {name: v.item() for name, v in dirty.items()}


def test_parts_of_micro_batches_sum_to_the_whole():
    """Any split into micro-batches, also one without a valid token, gives the single-batch metrics."""
    generator = torch.Generator().manual_seed(3)
    t, r = (-torch.rand(6, 5, generator=generator) * 3 for _ in range(2))
    mask = (torch.rand(6, 5, generator=generator) > 0.4).float()
    mask[2:4] = 0
    count = mask.sum()
    whole = combine_micro_batches({k: [v.item()] for k, v in mismatch_metrics(t, r, mask, count).items()})
    parts: dict[str, list[float]] = {}
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        for name, value in mismatch_metrics(t[rows], r[rows], mask[rows], count).items():
            parts.setdefault(name, []).append(value.item())
    assert combine_micro_batches(parts) == pytest.approx(whole, abs=1e-12)


def test_combine_rules():
    """Extremes by min and max without infinities, constants by mean, the rest by sum."""
    combined = combine_micro_batches(
        {
            "loss": [1.0, 2.0],
            "lr": [0.5, 0.5],
            "probs_ratio_min": [0.9, math.inf],
            "probs_ratio_max": [1.1, -math.inf],
            "probs_ratio_clamped_max": [-math.inf],
        }
    )
    assert combined == {"loss": 3.0, "lr": 0.5, "probs_ratio_min": 0.9, "probs_ratio_max": 1.1}


def test_scale_for_updates_leaves_extremes():
    """With two updates a step, summed metrics are halved beforehand and extremes stay."""
    assert scale_for_updates({"loss": 3.0, "probs_ratio_max": 1.2}, 2) == {"loss": 1.5, "probs_ratio_max": 1.2}
