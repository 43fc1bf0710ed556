"""A loss of the kind that NeMo-RL has, called as the policy's ranks call a loss."""

import pickle

import pytest
import torch
from upstream_fakes import Batch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import LossSettings
from nemo_rl_dsv4.integrations.nemo_rl import patches
from nemo_rl_dsv4.integrations.nemo_rl.loss import OUR_METRICS, UpstreamLoss


class InputType:
    def __init__(self, value):
        self.value = value


class TheirLoss:
    """Policy gradient: -A log p, a mean over tokens."""

    input_type = InputType("logprob")
    force_on_policy_ratio = False

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        assert isinstance(data, Batch) and isinstance(global_valid_toks, torch.Tensor)
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = -(data["advantages"][:, 1:] * next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "seqs": global_valid_seqs}


@pytest.fixture
def data():
    torch.manual_seed(0)
    return {
        "token_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1.0]),
        "advantages": torch.tensor([[1.0], [-2.0]]).expand(2, 4),
        "generation_logprobs": -torch.rand(2, 4),
        "prev_logprobs": -torch.rand(2, 4),
    }


def test_loss_and_gradient_are_theirs_and_the_mismatch_metrics_are_added(data):
    logprobs = (-torch.rand(2, 3)).requires_grad_()
    loss, metrics = UpstreamLoss(TheirLoss(), Batch)(logprobs, data, global_valid_seqs=2.0, global_valid_tokens=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(logprobs[0, :2].sum() - 2 * logprobs[1, 1:].sum()).item() / 4)
    assert logprobs.grad is not None and logprobs.grad[0].tolist() == [-0.25, -0.25, 0.0]
    assert metrics["loss"] == loss.item() and metrics["seqs"] == 2.0
    _, own = ClippedPGLoss(LossSettings(reference_policy_kl_penalty=0.0))(
        logprobs, data, global_valid_seqs=2.0, global_valid_tokens=4.0
    )
    assert {name: metrics[name] for name in OUR_METRICS} == {name: own[name] for name in OUR_METRICS}


def test_on_policy_the_mismatch_is_that_of_the_weights_being_trained(data):
    class OnPolicy(TheirLoss):
        force_on_policy_ratio = True

    logprobs = data["generation_logprobs"][:, 1:].clone()
    loss = UpstreamLoss(OnPolicy(), Batch)
    _, metrics = loss(logprobs, data, global_valid_seqs=2.0, global_valid_tokens=4.0)
    assert metrics["rollout_corr/kl"] == 0.0 and metrics["training/rollout_probs_diff_max"] == 0.0


def test_a_loss_of_logits_is_refused():
    class Distillation(TheirLoss):
        input_type = InputType("distillation")

    with pytest.raises(UserError, match="loss Distillation takes 'distillation' as input"):
        UpstreamLoss(Distillation(), Batch)
    with pytest.raises(UserError, match="takes None as input"):
        UpstreamLoss(lambda: None, Batch)


def test_a_rank_makes_nemo_rl_importable_before_it_unpickles_the_loss(monkeypatch):
    calls = []
    monkeypatch.setattr(patches, "import_nemo_rl", lambda: calls.append("imported"))
    restored = pickle.loads(pickle.dumps(UpstreamLoss(TheirLoss(), Batch)))
    assert calls == ["imported"] and isinstance(restored.loss_fn, TheirLoss) and restored.batch_type is Batch
