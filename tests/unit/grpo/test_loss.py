import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.batch import count_valid, slice_rows
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss, clipped_policy_gradient, dual_clip
from nemo_rl_dsv4.grpo.metrics import combine_micro_batches
from nemo_rl_dsv4.grpo.settings import LossSettings

VARIANTS = {
    "token": LossSettings(),
    "sequence": LossSettings(token_level_loss=False, ratio_clip_max=0.28, ratio_clip_c=10.0),
    "tis": LossSettings(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.1,
    ),
    "icepop": LossSettings(
        token_level_loss=False,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.2,
        truncated_importance_sampling_ratio_min=0.8,
    ),
    "seq-mask-tis": LossSettings(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.1,
        truncated_importance_sampling_ratio_min=0.95,
    ),
    "gspo": LossSettings(
        token_level_loss=False, sequence_level_importance_ratios=True, use_importance_sampling_correction=True
    ),
    "on-policy": LossSettings(force_on_policy_ratio=True, reference_policy_kl_penalty=0.0),
    "on-policy-kl": LossSettings(use_on_policy_kl_approximation=True, reference_policy_kl_penalty=0.5),
}


def random_batch(seed: int = 0, rows: int = 6, length: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> torch.Tensor:
        return -0.2 - torch.rand(rows, length, generator=generator)

    base = logprobs()
    token_mask = (torch.rand(rows, length, generator=generator) > 0.3).long()
    token_mask[:, :2] = 0
    token_mask[1] = 0
    sample_mask = torch.ones(rows)
    sample_mask[3] = 0
    return {
        "curr": base + 0.3 * torch.randn(rows, length, generator=generator),
        "prev_logprobs": base,
        "generation_logprobs": base + 0.1 * torch.randn(rows, length, generator=generator),
        "reference_policy_logprobs": base + 0.2 * torch.randn(rows, length, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous(),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
    }


def run(settings: LossSettings, data: dict[str, torch.Tensor], splits: Sequence[tuple[int, int]]):
    """Loss, gradient and combined metrics over the given row ranges, with the normalisers of the whole batch."""
    curr = data["curr"][:, 1:].clone().requires_grad_()
    seqs, tokens = count_valid(data)
    loss_fn = ClippedPGLoss(settings)
    total, metrics = 0.0, {}
    for start, stop in splits:
        loss, values = loss_fn(
            curr[start:stop], slice_rows(data, start, stop), global_valid_seqs=seqs, global_valid_tokens=tokens
        )
        loss.backward()
        total += loss.item()
        for name, value in values.items():
            metrics.setdefault(name, []).append(value)
    assert curr.grad is not None
    return total, curr.grad, combine_micro_batches(metrics)


def one_token(curr, prev, gen, advantage, settings, reference=0.0):
    """Loss and gradient of a single response token (the second of two)."""
    data = {
        "prev_logprobs": torch.tensor([[0.0, prev]]),
        "generation_logprobs": torch.tensor([[0.0, gen]]),
        "reference_policy_logprobs": torch.tensor([[0.0, reference]]),
        "advantages": torch.full((1, 2), advantage),
        "token_mask": torch.tensor([[0, 1]]),
        "sample_mask": torch.ones(1),
    }
    logprob = torch.tensor([[curr]], requires_grad=True)
    loss, metrics = ClippedPGLoss(settings)(logprob, data, global_valid_seqs=1, global_valid_tokens=1)
    loss.backward()
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item(), metrics


NO_KL = LossSettings(reference_policy_kl_penalty=0.0)


def test_unclipped_ratio_by_hand():
    """A = 2, ratio 1.1: loss -2.2, gradient -A r."""
    loss, grad, _ = one_token(-1.0 + math.log(1.1), -1.0, -1.0, 2.0, NO_KL)
    assert loss == pytest.approx(-2.2, rel=1e-6)
    assert grad == pytest.approx(-2.2, rel=1e-6)


def test_clipping_stops_the_gradient_only_in_the_profitable_direction():
    """A > 0: a ratio above 1.2 is clipped (no gradient), one below 0.8 is not; mirrored for A < 0."""
    for ratio, advantage, value, clipped in [
        (1.5, 1.0, -1.2, True),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),
    ]:
        loss, grad, metrics = one_token(math.log(ratio), 0.0, 0.0, advantage, NO_KL)
        assert loss == pytest.approx(value, rel=1e-6)
        assert grad == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-6)
        assert metrics["probs_ratio"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["probs_ratio_clamped"] == pytest.approx(min(max(ratio, 0.8), 1.2), rel=1e-6)


def test_dual_clip_bounds_negative_advantages():
    """A = -1, ratio 20, c = 10: loss 10 instead of 20, no gradient; A > 0 is untouched."""
    settings = LossSettings(reference_policy_kl_penalty=0.0, ratio_clip_c=10.0)
    loss, grad, _ = one_token(math.log(20.0), 0.0, 0.0, -1.0, settings)
    assert (loss, grad) == (pytest.approx(10.0), 0.0)
    advantages = torch.tensor([1.0, -1.0])
    token_loss = clipped_policy_gradient(advantages, torch.tensor([0.1, 20.0]), torch.tensor([0.8, 1.2]))
    assert dual_clip(token_loss, advantages, 10.0).tolist() == pytest.approx([-0.1, 10.0])


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # d = reference - curr = 0.5; value k(d); gradient = score-function part k(d) + d k / d curr
        ("k1", -0.5, -0.5 + 1.0),
        ("k2", 0.125, 0.125 - 0.5),
        ("k3", math.exp(0.5) - 1.5, (math.exp(0.5) - 1.5) + (1 - math.exp(0.5))),
    ],
)
def test_kl_penalty_value_and_gradient(kind, value, gradient):
    """The penalty of each estimator, with the gradient through the sampling probability."""
    settings = LossSettings(reference_policy_kl_penalty=2.0, reference_policy_kl_type=kind)
    loss, grad, metrics = one_token(-1.0, -1.0, -1.0, 0.0, settings, reference=-0.5)
    assert loss == pytest.approx(2.0 * value, rel=1e-5)
    assert grad == pytest.approx(2.0 * gradient, rel=1e-5)
    assert metrics["kl_penalty"] == pytest.approx(value, rel=1e-5)


def test_kl_gradient_is_that_of_the_exact_kl_in_expectation():
    """Summed over all tokens with their probabilities, k1 and k3 have the gradient of KL(policy || reference)."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([0.1, 0.5, -0.4]).log_softmax(-1)
    exact = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    for kind in ("k1", "k3"):
        curr = logits.log_softmax(-1)
        data = {
            "prev_logprobs": torch.stack([torch.zeros(3), curr.detach()], 1),
            "generation_logprobs": torch.stack([torch.zeros(3), curr.detach()], 1),
            "reference_policy_logprobs": torch.stack([torch.zeros(3), reference], 1),
            "advantages": torch.zeros(3, 2),
            "token_mask": torch.tensor([[0, 1]] * 3),
            "sample_mask": curr.detach().exp(),  # each token weighted by its probability
        }
        settings = LossSettings(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
        loss, _ = ClippedPGLoss(settings)(curr.unsqueeze(-1), data, global_valid_seqs=1, global_valid_tokens=1)
        (found,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_kl_clamps():
    """The log ratio is clamped at 20 and passes no gradient there; the estimate is clamped at 10."""
    settings = LossSettings(reference_policy_kl_penalty=1.0, reference_policy_kl_type="k3")
    loss, grad, _ = one_token(-100.0, -100.0, -100.0, 0.0, settings)
    assert (loss, grad) == (pytest.approx(10.0), 0.0)
    open_output = LossSettings(
        reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1", kl_output_clamp_value=None
    )
    loss, grad, _ = one_token(-100.0, -100.0, -100.0, 0.0, open_output)
    assert (loss, grad) == (pytest.approx(-20.0), 0.0)


def test_tis_weight_multiplies_and_is_detached():
    """Training over rollout probability e^1, truncated at 2: loss and gradient are twice the plain ones."""
    loss, grad, metrics = one_token(-1.0, -1.0, -2.0, 1.0, _tis(2.0))
    assert loss == pytest.approx(-2.0)
    assert grad == pytest.approx(-2.0)
    assert metrics["sampling_importance_ratio"] == pytest.approx(2.0)
    assert metrics["is_oob_ratio"] == 1.0
    loss, _, metrics = one_token(-1.0, -1.0, -1.2, 1.0, _tis(2.0))
    assert loss == pytest.approx(-math.exp(0.2), rel=1e-5)
    assert metrics["is_oob_ratio"] == 0.0


def _tis(ratio: float) -> LossSettings:
    return LossSettings(
        reference_policy_kl_penalty=0.0,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=ratio,
    )


def test_token_and_sequence_means_by_hand():
    """Two sequences of 1 and 3 tokens, ratio 1, advantages 1 and -1: token mean (−1+3)/4, sequence mean 0."""
    data = {
        "prev_logprobs": torch.zeros(2, 4),
        "generation_logprobs": torch.zeros(2, 4),
        "advantages": torch.tensor([[1.0] * 4, [-1.0] * 4]),
        "token_mask": torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1]]),
        "sample_mask": torch.ones(2),
        "curr": torch.zeros(2, 4),
    }
    token, _, _ = run(NO_KL, data, [(0, 2)])
    sequence, grad, _ = run(LossSettings(reference_policy_kl_penalty=0.0, token_level_loss=False), data, [(0, 2)])
    assert token == pytest.approx(0.5)
    assert sequence == pytest.approx(0.0)
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.0, 0.0], [1 / 6, 1 / 6, 1 / 6]]))


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_and_ranks_sum_to_the_single_batch(name):
    """Loss, gradient and metrics do not depend on the split, even into rows that hold no valid token."""
    data = random_batch()
    whole_loss, whole_grad, whole_metrics = run(VARIANTS[name], data, [(0, 6)])
    for splits in ([(0, 1), (1, 2), (2, 6)], [(0, 3), (3, 4), (4, 6)], [(row, row + 1) for row in range(6)]):
        loss, grad, metrics = run(VARIANTS[name], data, splits)
        assert loss == pytest.approx(whole_loss, abs=1e-6)
        torch.testing.assert_close(grad, whole_grad, atol=1e-7, rtol=1e-5)
        assert metrics == pytest.approx(whole_metrics, abs=1e-6)
    assert set(whole_metrics) >= {"loss", "gen_kl_error", "probs_ratio_min", "sampling_importance_ratio"}


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_positions_have_no_influence(name):
    """NaN and inf on prompts, padding and masked samples change neither loss nor gradient nor metrics."""
    data = random_batch()
    clean_loss, clean_grad, clean_metrics = run(VARIANTS[name], data, [(0, 6)])
    masked = (data["token_mask"] * data["sample_mask"].unsqueeze(-1)) == 0
    for key, garbage in (
        ("curr", -torch.inf),
        ("prev_logprobs", torch.nan),
        ("generation_logprobs", torch.inf),
        ("reference_policy_logprobs", torch.nan),
        ("advantages", torch.nan),
    ):
        data[key] = torch.where(masked, torch.full_like(data[key], garbage), data[key])
    loss, grad, metrics = run(VARIANTS[name], data, [(0, 6)])
    assert loss == clean_loss
    assert torch.equal(grad, clean_grad)
    assert metrics == clean_metrics
    assert (grad[masked[:, 1:]] == 0).all()


def test_gradient_matches_finite_differences():
    """autograd against central differences of the actor loss, away from the clipping corners (float32: 1e-3)."""
    settings = replace(VARIANTS["sequence"], reference_policy_kl_penalty=0.0)
    data = random_batch(seed=5)
    _, grad, _ = run(settings, data, [(0, 6)])
    step = 1e-2
    checked = 0
    for row, column in ((grad != 0).nonzero()).tolist():
        values = []
        for sign in (1, -1):
            moved = dict(data, curr=data["curr"].clone())
            moved["curr"][row, column + 1] += sign * step
            values.append(run(settings, moved, [(0, 6)]))
        if any(moved_grad[row, column] == 0 for _, moved_grad, _ in values):
            continue
        numeric = (values[0][0] - values[1][0]) / (2 * step)
        assert grad[row, column].item() == pytest.approx(numeric, abs=1e-4, rel=1e-3)
        checked += 1
    assert checked >= 10


def test_force_on_policy_needs_no_previous_logprobs():
    data = random_batch()
    del data["prev_logprobs"]
    _, grad, metrics = run(VARIANTS["on-policy"], data, [(0, 6)])
    _, tokens = count_valid(data)
    mask = (data["token_mask"] * data["sample_mask"].unsqueeze(-1))[:, 1:]
    torch.testing.assert_close(grad, -data["advantages"][:, 1:] * mask / tokens)
    assert metrics["probs_ratio"] == pytest.approx(1.0)


def test_everything_masked_gives_zero_loss_with_a_graph():
    """A batch whose samples are all masked trains nothing and crashes nothing."""
    data = random_batch()
    data["sample_mask"] = torch.zeros(6)
    loss, grad, metrics = run(VARIANTS["tis"], data, [(0, 6)])
    assert loss == 0.0 and (grad == 0).all()
    assert "probs_ratio_max" not in metrics


def test_wrong_shape_names_the_tensor():
    data = random_batch()
    data["advantages"] = data["advantages"][:, 1:]
    with pytest.raises(ValueError, match="'advantages' has shape"):
        run(NO_KL, data, [(0, 6)])
    del data["advantages"]
    with pytest.raises(ValueError, match="no 'advantages'"):
        run(NO_KL, data, [(0, 6)])


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"ratio_clip_c": 1.0}, "ratio_clip_c"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_type"),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
            "use_importance_sampling_correction",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 2.0,
            },
            "truncated_importance_sampling_ratio_min",
        ),
    ],
)
def test_contradicting_settings_are_named(values, key):
    with pytest.raises(UserError, match=key):
        LossSettings(**values)
