"""One rank of the policy, in this process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.quantized_weights import weight_roundings
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import Meshes, ParallelSizes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss
from nemo_rl_dsv4.utils.file_digest import sha256_of


@pytest.fixture
def small_config(tiny_config):
    """Two layers are enough here: ratio 0 with hash routing, and ratio 4 with an indexer."""
    return tiny_config | {"num_hidden_layers": 2, "compress_ratios": [0, 4], "hc_mult": 2, "hc_sinkhorn_iters": 2}


def make_worker(config, *, qat=False, lr=1e-3, **kwargs):
    model = build_model(automodel_config(config), routing_weight_after_down=qat, seed=1)
    return PolicyWorker(
        model,
        Meshes(ParallelSizes(1)),
        profile=get_profile("vllm-hopper"),
        fake_quant=dict.fromkeys(SWITCHES, qat),
        **{"micro_batch_size": 4, "logprob_batch_size": 3, **kwargs},
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": lr, "weight_decay": 0.0}},
    )


def batch(rows=6, width=24):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, width + 1, (rows,), generator=generator)
    lengths[0] = width
    ids = torch.randint(3, 160, (rows, width), generator=generator)
    inside = torch.arange(width) < lengths.unsqueeze(1)
    return {
        "input_ids": torch.where(inside, ids, 1),
        "input_lengths": lengths,
        "token_mask": (inside & (torch.arange(width) >= 5)).float(),
        "sample_mask": torch.ones(rows),
    }


def draw_numbers():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def train(worker, data):
    tokens = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    return worker.train(data, DemonstrationLoss(), global_valid_seqs=len(data["input_ids"]), global_valid_tokens=tokens)


def test_logprobs_are_those_of_each_row_alone(small_config):
    worker, data = make_worker(small_config), batch()
    found = worker.get_logprobs(data)["logprobs"]
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            table = torch.log_softmax(worker.model(ids).logits[0].float(), -1)
        expected = table[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(found[row, 1:length], expected, rtol=0, atol=1e-5)
        assert found[row, 0] == 0 and (found[row, length:] == 0).all()


def test_micro_batches_change_nothing(small_config):
    data = batch()
    one, many = make_worker(small_config, micro_batch_size=6), make_worker(small_config, micro_batch_size=1)
    first, second = train(one, data), train(many, data)
    assert second["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)
    assert len(second["all_mb_metrics"]) == 6
    state = many.full_state_dict()
    for name, value in one.full_state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-4, msg=name)  # AdamW turns 1e-9 into a full step


def test_training_lowers_the_loss_and_leaves_the_indexer(small_config):
    worker, data = make_worker(small_config, qat=True, lr=3e-3), batch()
    before = {k: v.clone() for k, v in worker.full_state_dict().items()}
    losses = [train(worker, data)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3
    after = worker.full_state_dict()
    for name, value in before.items():
        if ".indexer." in name or "tid2eid" in name:
            assert torch.equal(after[name], value), name
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_offloading_drops_workspaces(small_config):
    """C087: FP8 modules kept a second copy of their weights on the GPU after everything else had left it."""
    worker, data = make_worker(small_config, offload_optimizer_for_logprob=True), batch(rows=1)
    worker.model.lm_head._fp8_workspaces = {"weight": torch.zeros(8, dtype=torch.uint8)}
    worker.get_logprobs(data)
    assert worker.model.lm_head._fp8_workspaces == {}


def held(worker):
    """Storages that the worker keeps between calls, by what they are."""
    kept = {
        "weights": [*worker.model.parameters(), *worker.model.buffers()],
        "reference": worker.reference,
        "codes": [tensor for *_, rounding in weight_roundings(worker.model) for tensor in rounding.tensors()],
        "optimizer": [value for state in worker.optimizer.state.values() for value in state.values()],
    }
    return {
        name: {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        for name, tensors in kept.items()
    }


@pytest.mark.parametrize("call", ["logprobs", "reference", "train", "weights", "checkpoint", "load"])
def test_a_worker_that_sleeps_computes_what_one_that_never_does(small_config, tmp_path, call):
    """Everything that it keeps leaves, and every call brings back what it needs."""
    data, answers = batch(), []
    for sleeps in (False, True):
        worker, folder = make_worker(small_config, qat=True, keep_reference=True, lr=1e-2), str(tmp_path / str(sleeps))
        train(worker, data)
        worker.get_logprobs(data)  # codes of the new weights are in the cache
        if call == "load":
            worker.save_checkpoint(folder)
        full = held(worker)
        assert all(sum(sizes.values()) > 0 for sizes in full.values())
        if sleeps:
            left = worker.sleep_optimizer()
            assert left == sum(full["optimizer"].values())
            left += worker.sleep()
            assert not any(sum(sizes.values()) for sizes in held(worker).values())
            assert left == sum({key: size for sizes in full.values() for key, size in sizes.items()}.values())
        answer = {
            "logprobs": lambda w, _: w.get_logprobs(data)["logprobs"],
            "reference": lambda w, _: w.get_reference_logprobs(data)["reference_logprobs"],
            "train": lambda w, _: torch.tensor([train(w, data)[key] for key in ("loss", "grad_norm")]),
            "weights": lambda w, _: w.full_state_dict()["lm_head.weight"],
            "checkpoint": PolicyWorker.save_checkpoint,
            "load": PolicyWorker.load_checkpoint,
        }[call](worker, folder)
        answers.append([answer, worker.get_logprobs(data)["logprobs"], torch.tensor(train(worker, data)["loss"])])
        if call in ("logprobs", "reference", "weights") and sleeps:
            assert sum(held(worker)["optimizer"].values()) == sum(full["optimizer"].values())
    for found, wanted in zip(*answers, strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


def test_an_optimizer_leaves_alone_what_no_row_uses(small_config):
    """Short rows use no ratio-128 compressor. Whether it decayed was a matter of the layout: under context parallelism
    it had a gradient of zero, and then in every later model of the process too, elsewhere none."""
    small_config["compress_ratios"] = [0, 128]
    worker = make_worker(small_config)
    worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    unused = worker.model.get_parameter("model.layers.1.self_attn.compressor.wkv.weight")
    before = unused.detach().clone()
    moved = worker.model.get_parameter("model.layers.1.self_attn.wkv.weight")
    start = moved.detach().clone()
    worker.optimizer.register_step_pre_hook(lambda *_: grads.append(unused.grad))
    grads: list[torch.Tensor | None] = []
    worker.model.register_forward_pre_hook(lambda *_: setattr(unused, "grad", torch.zeros_like(unused)))
    train(worker, batch())
    assert grads == [None] and torch.equal(unused.detach(), before) and not torch.equal(moved.detach(), start)


def fail(*_):
    raise RuntimeError("no memory")


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_worker_that_has_trained_goes_back_to_its_checkpoint(small_config, tmp_path, name):
    """An optimizer that has a state for some parameters only, as no row used the others, broke off."""
    small_config["compress_ratios"] = [0, 128]
    worker, data = make_worker(small_config), batch()
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    worker.optimizer = getattr(torch.optim, name)(worker.model.parameters(), lr=1e-2, **kwargs)
    train(worker, data)
    worker.save_checkpoint(str(tmp_path / "saved"))
    expected = [train(worker, data)["loss"] for _ in range(2)]
    worker.load_checkpoint(str(tmp_path / "saved"))
    assert [train(worker, data)["loss"] for _ in range(2)] == expected


@pytest.mark.parametrize("broken", ["making states", "reading"])
def test_a_failed_restore_leaves_the_optimizer_as_it_was(small_config, tmp_path, broken):
    """Its state is cleared first, because torch makes a new one for every parameter, by a step: where that step failed,
    not the read after it, the state was lost."""
    worker, data = make_worker(small_config), batch()
    train(worker, data)
    worker.save_checkpoint(str(tmp_path / "saved"))
    moments = {id(p): dict(state) for p, state in worker.optimizer.state.items()}
    if broken == "reading":
        (tmp_path / "saved" / "__0_0.distcp").write_bytes(b"")
    else:
        step = worker.optimizer.register_step_post_hook(fail)
    with pytest.raises(UserError, match="cannot be restored"):
        worker.load_checkpoint(str(tmp_path / "saved"))
    if broken == "making states":
        step.remove()
    assert {id(p): dict(state) for p, state in worker.optimizer.state.items()} == moments
    assert [group["lr"] for group in worker.optimizer.param_groups] == [1e-3]


def test_an_infinite_gradient_takes_no_step(small_config):
    """C070: whatever a kernel's backward pass makes of it, a gradient that is not finite changes no weight."""
    worker, data = make_worker(small_config), batch()
    before = worker.model.lm_head.weight.detach().clone()

    def explode(logprobs, data, **_):
        return logprobs.sum() * torch.inf, {}

    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        worker.train(data, explode, global_valid_seqs=1, global_valid_tokens=1)
    assert torch.equal(worker.model.lm_head.weight, before)
    assert all(p.grad is None for p in worker.model.parameters())


def test_reference_logprobs_stay_where_they_began(small_config):
    worker, data = make_worker(small_config, qat=True, keep_reference=True, lr=1e-2), batch()
    start = worker.get_logprobs(data)["logprobs"]
    train(worker, data)
    moved = worker.get_logprobs(data)["logprobs"]
    assert (moved - start).abs().max() > 1e-2
    torch.testing.assert_close(worker.get_reference_logprobs(data)["reference_logprobs"], start, rtol=0, atol=0)
    torch.testing.assert_close(worker.get_logprobs(data)["logprobs"], moved, rtol=0, atol=0)
    with pytest.raises(UserError, match="no reference policy was kept"):
        make_worker(small_config).get_reference_logprobs(data)


@pytest.mark.parametrize("ratios", [[0, 4], [0, 128]], ids=str)
def test_a_restored_worker_goes_on_bitwise(small_config, tmp_path, ratios):
    """Short rows never use a ratio-128 compressor: it has no optimizer state, which once made the restore fail."""
    small_config["compress_ratios"] = ratios
    worker, data = make_worker(small_config, qat=True), batch()
    train(worker, data)
    worker.start_checkpoint(str(tmp_path / "saved"))
    numbers = draw_numbers()
    expected = [train(worker, data)["loss"] for _ in range(2)]  # the state was copied: this does not reach the files
    digests = worker.state_writer.wait()
    assert worker.state_writer.done() and worker.state_writer.wait() == {}
    assert digests == {path.name: sha256_of(path) for path in (tmp_path / "saved").iterdir()}
    again = make_worker(small_config, qat=True)
    again.load_checkpoint(str(tmp_path / "saved"))
    assert draw_numbers() == numbers
    assert [train(again, data)["loss"] for _ in range(2)] == expected


def test_a_damaged_checkpoint_is_refused(small_config, tmp_path):
    worker = make_worker(small_config)
    with pytest.raises(UserError, match="holds no training checkpoint"):
        worker.load_checkpoint(str(tmp_path))
    worker.save_checkpoint(str(tmp_path / "saved"))
    (data_file,) = (tmp_path / "saved").glob("*.distcp")
    data_file.write_bytes(data_file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be restored"):
        worker.load_checkpoint(str(tmp_path / "saved"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the training state .*checkpointing.checkpoint_dir"):
        worker.save_checkpoint(str(tmp_path / "file" / "below"))
