"""The group of ranks behind NeMo-RL's policy interface, with a group that notes its calls."""

import json

import pytest
import torch
from upstream_fakes import Batch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import read_checkpoint
from nemo_rl_dsv4.integrations.nemo_rl.generation import RolloutClock
from nemo_rl_dsv4.integrations.nemo_rl.policy import GroupPolicy, loop_metrics, plain_batch


class Loss:
    class input_type:
        value = "logprob"


class Group:
    """Two sequences of three tokens; `train` returns what two updates of two micro-batches would."""

    global_batch_size = 2

    class spec:
        micro_batch_size = 1

    def __init__(self):
        self.calls = []

    def get_logprobs(self, data):
        self.calls.append(("get_logprobs", sorted(data)))
        return {"logprobs": torch.zeros(2, 3)}

    def get_reference_policy_logprobs(self, data):
        return {"reference_logprobs": torch.ones(2, 3)}

    def train(self, data, loss_fn):
        self.calls.append(("train", loss_fn))
        return {
            "loss": torch.tensor([0.5, 1.5], dtype=torch.float64),
            "grad_norm": torch.tensor([1.0, 3.0], dtype=torch.float64),
            "lr": 1e-3,
            "all_mb_metrics": {
                "loss": [0.25, 0.75],
                "gen_kl_error": [0.1, 0.2],
                "probs_ratio_max": [1.5, 4.0],
                "training/rollout_probs_diff_max": [0.5, 0.25],
                "global_valid_toks": [3.0, 3.0],
            },
        }

    def export_to(self, engines):
        self.calls.append(("export_to", engines))
        return {"seconds": 1.0}

    def save_checkpoint(self, folder):
        folder.mkdir()
        (folder / ".metadata").write_text("state")

        def finish():
            (folder / "weights.distcp").write_text("weights")
            return {}

        return finish

    def load_checkpoint(self, folder):
        self.calls.append(("load_checkpoint", folder))

    def shutdown(self):
        self.calls.append(("shutdown",))


@pytest.fixture
def data():
    return Batch(
        input_ids=torch.ones(2, 3, dtype=torch.int64),
        input_lengths=torch.tensor([3, 2], dtype=torch.int32),
        token_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]),
        sample_mask=torch.tensor([1.0, 1.0]),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        content=["a text", "another"],
    )


def make(**kwargs):
    return GroupPolicy(Group(), RolloutClock(42), Batch, **kwargs)


def test_a_batch_of_nemo_rl_becomes_plain_tensors(data):
    batch = plain_batch(data)
    assert set(batch) == {"input_ids", "input_lengths", "token_mask", "sample_mask", "advantages"}
    assert type(batch) is dict and batch["input_lengths"].dtype == torch.int64
    assert batch["advantages"].is_contiguous() and batch["advantages"].tolist() == [[1.0] * 3, [-1.0] * 3]


def test_a_batch_that_is_no_batch_is_refused(data):
    with pytest.raises(UserError, match="has advantages as list"):
        plain_batch(Batch(data, advantages=[1, 2]))
    with pytest.raises(UserError, match=r"different numbers of rows: .*'input_ids': 2.*'sample_mask': 1"):
        plain_batch(Batch(data, sample_mask=torch.ones(1)))


def test_training_returns_what_the_loop_aggregates(data):
    """The loop sums lists, takes means and extremes: lists of one number come out as they went in."""
    policy = make()
    result = policy.train(data, Loss())
    assert result["loss"].tolist() == [0.5, 1.5]
    assert result["grad_norm"].item() == 2.0 and result["grad_norm"].dtype == torch.float32
    metrics = result["all_mb_metrics"]
    assert all(isinstance(values, list) and len(values) == 1 for values in metrics.values())
    assert metrics["loss"] == [1.0] and metrics["gen_kl_error"] == [pytest.approx(0.3)]
    assert metrics["probs_ratio_max"] == [4.0] and metrics["training/rollout_probs_diff_max"] == [0.5]
    assert metrics["lr"] == [1e-3] and metrics["global_valid_toks"] == [3.0] and metrics["global_valid_seqs"] == [2.0]
    assert policy._clock.step == 1


def test_a_loss_that_is_not_finite_stops_the_run(data):
    result = Group().train(plain_batch(data), None)
    result["grad_norm"] = torch.tensor([float("nan")])
    with pytest.raises(FloatingPointError, match="training diverged: .*grad_norm"):
        loop_metrics(result, plain_batch(data))


def test_scores_come_back_in_the_loops_batch_type(data):
    policy = make()
    assert isinstance(policy.get_logprobs(data, timer=None), Batch)
    assert policy.get_reference_policy_logprobs(data)["reference_logprobs"].sum() == 6
    assert policy._group.calls == [
        ("get_logprobs", ["advantages", "input_ids", "input_lengths", "sample_mask", "token_mask"])
    ]


def test_batch_sizes_other_than_the_recipes_and_evaluation_are_refused(data):
    policy = make()
    policy.train(data, Loss(), gbs=2, mbs=1)
    with pytest.raises(UserError, match=r"train\(gbs=4\): the ranks were built for 2"):
        policy.train(data, Loss(), gbs=4)
    with pytest.raises(UserError, match=r"train\(mbs=2\): the ranks were built for 1"):
        policy.train(data, Loss(), mbs=2)
    with pytest.raises(UserError, match="eval_mode=True"):
        policy.train(data, Loss(), eval_mode=True)


def test_what_is_not_supported_says_why(data):
    policy = make()
    with pytest.raises(UserError, match="get_topk_logits"):
        policy.get_topk_logits(data, 4)
    with pytest.raises(UserError, match="a scale for every token"):
        policy.calibrate_qkv_fp8_scales(data)
    with pytest.raises(UserError, match="2 KV-cache scales were given"):
        policy.send_weights({"k": 1.0, "v": 1.0})


def test_a_tree_without_the_synchronizer_hook_still_refits():
    """Its loop calls the stream of the policy, and then waits for what both sides return."""
    policy = make()
    policy.connect("engines")
    assert policy.stream_weights_via_ipc_zmq(1 << 30, kv_scales=None) == []
    assert policy.broadcast_weights_for_collective() == []
    assert policy._group.calls == [("export_to", "engines")] * 2


def test_a_checkpoint_is_whole_once_it_is_finalized(tmp_path):
    folder = tmp_path / "tmp_step_3"
    folder.mkdir()
    (folder / "training_info.json").write_text(json.dumps({"total_steps": 3}))
    policy = make(notes=lambda final: {"SERVE.md": f"serve {final.name}"})
    policy.save_checkpoint(str(folder / "policy" / "weights"), str(folder / "policy" / "optimizer"), "tokenizer", {})
    assert not (folder / "manifest.json").exists()
    policy.finalize_async_save()
    policy.finalize_async_save()  # nothing pending
    assert (folder / "SERVE.md").read_text() == "serve step_3"
    assert read_checkpoint(folder) == {"total_steps": 3}
    (folder / "policy" / "weights.distcp").write_text("wEights")
    with pytest.raises(UserError, match="the content of policy/weights.distcp is not what was written"):
        read_checkpoint(folder)
    policy.load_checkpoint(folder)
    assert policy._group.calls == [("load_checkpoint", folder / "policy")]


def test_another_layout_of_folders_and_a_missing_optimizer_are_refused(tmp_path):
    policy = make()
    with pytest.raises(UserError, match="wanted .*/policy/weights"):
        policy.save_checkpoint(str(tmp_path / "actor" / "weights"), "optimizer")
    with pytest.raises(UserError, match="save_optimizer is false"):
        policy.save_checkpoint(str(tmp_path / "policy" / "weights"))
