import math

import pytest
import torch

from nemo_rl_dsv4.grpo import rollout_correction as correction
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import LossSettings


def test_weights_are_clamped_before_exp_and_detached():
    """A log ratio of 100 overflows nothing: exp(20)."""
    train = torch.tensor([[100.0, -100.0, 0.5]], requires_grad=True)
    weights = correction.importance_weights(train, torch.zeros(1, 3))
    assert weights.tolist()[0] == pytest.approx([math.exp(20), math.exp(-20), math.exp(0.5)], rel=1e-5)
    assert not weights.requires_grad


def test_tis_truncates_and_reports():
    found = correction.truncate_token_weights(torch.tensor([[0.1, 1.0, 3.0]]), 0.5, 2.0)
    assert found.weights.tolist() == [[0.5, 1.0, 2.0]]
    assert found.out_of_bounds is not None and found.out_of_bounds.tolist() == [[True, False, True]]


def test_icepop_zeros_outside():
    found = correction.icepop_weights(torch.tensor([[0.1, 1.0, 3.0]]), 0.5, 2.0)
    assert found.weights.tolist() == [[0.0, 1.0, 0.0]]


def test_sequence_mask_by_geometric_mean():
    """Log ratios 0.3, -0.1 (mean 0.1) stay within 1.2; 0.5, 0.3 (mean 0.4) do not; padding does not count."""
    train = torch.tensor([[0.3, -0.1, 9.0], [0.5, 0.3, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    geometric = correction.geometric_mean_ratio(train, torch.zeros(2, 3), mask)
    assert geometric.tolist() == pytest.approx([math.exp(0.1), math.exp(0.4)], rel=1e-6)
    weights = correction.importance_weights(train, torch.zeros(2, 3))
    found = correction.mask_sequences_by_geometric_mean(weights, geometric, 0.8, 1.2)
    assert found.weights[0].tolist() == pytest.approx(weights[0].tolist())
    assert found.weights[1].tolist() == [0.0, 0.0, 0.0]
    assert found.out_of_bounds is not None and found.out_of_bounds.tolist() == [False, True]


def test_sequence_weight_is_the_product_of_token_weights():
    train = torch.tensor([[0.3, -0.1, 9.0]])
    found = correction.sequence_importance_weights(train, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]]))
    assert found.tolist()[0] == pytest.approx([math.exp(0.2)], rel=1e-6)


def test_sequence_level_weight_metric_averages_over_sequences():
    """With one weight a sequence, sampling_importance_ratio is the mean over sequences, not tokens."""
    settings = LossSettings(
        token_level_loss=False,
        sequence_level_importance_ratios=True,
        use_importance_sampling_correction=True,
        reference_policy_kl_penalty=0.0,
    )
    data = {
        "prev_logprobs": torch.tensor([[0.0, 0.2, 0.0], [0.0, 0.1, 0.3]]),
        "generation_logprobs": torch.zeros(2, 3),
        "advantages": torch.ones(2, 3),
        "token_mask": torch.tensor([[0, 1, 0], [0, 1, 1]]),
        "sample_mask": torch.ones(2),
    }
    _, metrics = ClippedPGLoss(settings)(data["prev_logprobs"][:, 1:], data, global_valid_seqs=2, global_valid_tokens=3)
    assert metrics["sampling_importance_ratio"] == pytest.approx((math.exp(0.2) + math.exp(0.4)) / 2, rel=1e-6)


def test_sequences_with_high_error_are_masked():
    """exp|r - t| averages 1.1 and 2.0: a threshold of 1.5 masks the second; None masks none."""
    train = torch.tensor([[math.log(1.1), 0.0], [math.log(3.0), 0.0]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    error = correction.sequence_mult_prob_error(train, torch.zeros(2, 2), mask)
    assert error.tolist() == pytest.approx([1.1, 2.0], rel=1e-6)
    assert correction.mask_high_error_sequences(torch.ones(2), error, 1.5).tolist() == [1.0, 0.0]
    assert correction.mask_high_error_sequences(torch.ones(2), error, None).tolist() == [1.0, 1.0]
