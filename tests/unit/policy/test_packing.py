"""Bin packing of rows, and packed sequences that compute what each row alone does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.layout import packed_layout, plain_layout
from nemo_rl_dsv4.policy.packing import ALGORITHMS, Packing, pack_rows
from nemo_rl_dsv4.policy.parallel import Meshes, ParallelSizes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss

ALONE = Meshes(ParallelSizes(1))


def padded(length):
    return -(-length // 128) * 128


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_packed_once_and_nothing_overflows(algorithm, seed):
    lengths = torch.randint(1, 3000, (60,), generator=torch.Generator().manual_seed(seed))
    bins = pack_rows(lengths, 3072, algorithm)
    assert sorted(torch.cat(bins).tolist()) == list(range(60))
    loads = [sum(padded(int(length)) for length in lengths[rows]) for rows in bins]
    assert max(loads) <= 3072
    best = -(-sum(padded(int(length)) for length in lengths) // 3072)
    ratio = {"concatenative": 2.0, "first_fit_decreasing": 11 / 9, "modified_first_fit_decreasing": 71 / 60}[algorithm]
    assert len(bins) <= ratio * best + 6


def test_the_algorithms_differ_as_they_should():
    lengths = torch.tensor([600, 500, 400, 300, 200]) * 128
    capacity = 1000 * 128
    assert len(pack_rows(lengths, capacity, "concatenative")) == 3
    assert [rows.tolist() for rows in pack_rows(lengths, capacity, "first_fit_decreasing")] == [[0, 2], [1, 3, 4]]
    assert [rows.tolist() for rows in pack_rows(lengths, capacity, "modified_first_fit_decreasing")] == [
        [0, 2],
        [1, 3, 4],
    ]


def test_what_cannot_be_packed_is_named():
    with pytest.raises(UserError, match="a row of 300 tokens takes 384 .* = 256; raise it"):
        pack_rows(torch.tensor([300]), 256, "concatenative")
    with pytest.raises(UserError, match="algorithm is 'best_fit'; wanted one of"):
        pack_rows(torch.tensor([3]), 256, "best_fit")


def test_values_find_their_place_and_the_way_back():
    ids = torch.arange(1, 301).view(2, 150)
    lengths = torch.tensor([150, 20])
    packed = packed_layout(ids, lengths, ALONE)
    placed = packed.place(ids)
    assert placed.shape == (1, 384)  # 150 -> 256, 20 -> 128
    assert placed[0, :150].tolist() == ids[0].tolist() and placed[0, 256:276].tolist() == ids[1, :20].tolist()
    assert not placed[0, 150:256].any() and not placed[0, 276:].any()
    inputs = packed.model_inputs(ids)
    assert inputs["seq_lens_padded"].tolist() == [[256, 128]] and inputs["position_ids"][0, 256:259].tolist() == [
        0,
        1,
        2,
    ]
    for layout in (packed, plain_layout(ids, lengths, ALONE)):
        back = layout.restore(layout.place(ids).float())
        assert back[0].tolist() == ids[0].tolist()
        assert back[1, :20].tolist() == ids[1, :20].tolist() and not back[1, 20:].any()
    experts = torch.arange(2 * 150 * 3 * 2).view(2, 150, 3, 2)
    assert packed.place(experts, fill=-1)[0, 260].tolist() == experts[1, 4].tolist()
    assert (packed.place(experts, fill=-1)[0, 200] == -1).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_has_a_contiguous_half_and_its_global_positions(rank):
    """C065: rank 1 of two has positions 256 to 511 of 512, not 0 to 255 and no zigzag."""
    world: Any = {"cp": SimpleNamespace(get_local_rank=lambda: rank, get_group=object)}
    half = Meshes(ParallelSizes(2, cp=2), world)
    ids = torch.arange(1000, 1512)[None]
    inputs = plain_layout(ids, torch.tensor([512]), half).model_inputs(ids)
    assert inputs["position_ids"][0].tolist() == list(range(256 * rank, 256 * (rank + 1)))
    assert torch.equal(inputs["input_ids"][0], 1000 + inputs["position_ids"][0])


def worker(config, state, *, packing, qat=False, sequence_multiple=1):
    model = build_model(automodel_config(config), routing_weight_after_down=qat)
    model.load_state_dict(state)
    return PolicyWorker(
        model,
        ALONE,
        profile=get_profile("vllm-hopper"),
        fake_quant=dict.fromkeys(SWITCHES, qat),
        micro_batch_size=1,
        logprob_batch_size=1,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1e-2}},
        packing=packing,
        sequence_multiple=sequence_multiple,
    )


def rows():
    """One row over 256 and one over 128 tokens, so that compressed entries of both ratios stand in two documents."""
    lengths = torch.tensor([270, 30, 140, 5])
    inside = torch.arange(270) < lengths.unsqueeze(1)
    ids = torch.randint(3, 160, (4, 270), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": torch.where(inside, ids, 1),
        "input_lengths": lengths,
        "token_mask": inside.float(),
        "sample_mask": torch.ones(4),
    }


@pytest.mark.parametrize("qat", [False, True])
def test_packed_rows_compute_what_each_row_alone_does(config_once, training_once, qat):
    """All rows in one sequence against one row a sequence: log-probabilities, gradient norm and the updated weights."""
    data, found = rows(), {}
    for name, packing in (("alone", None), ("packed", Packing(1024, 1024))):
        policy = worker(config_once, training_once, packing=packing, qat=qat)
        logprobs = policy.get_logprobs(data)["logprobs"]
        out = policy.train(data, DemonstrationLoss(), global_valid_seqs=4.0, global_valid_tokens=441.0)
        assert len(out["all_mb_metrics"]) == (1 if packing else 4)
        found[name] = (logprobs, out["loss"], out["grad_norm"], policy.full_state_dict())
    (logprobs, loss, norm, weights), (expected, *others) = found["packed"], found["alone"]
    if qat:
        # A last-bit difference can move a value to the next FP8 code, and random weights amplify it: single tokens
        # differ by 0.06, so only means say something.
        assert (logprobs - expected).abs().mean() < 5e-3
        assert loss == pytest.approx(others[0], abs=5e-3) and norm == pytest.approx(others[1], rel=5e-2)
        return
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert loss == pytest.approx(others[0], abs=1e-6) and norm == pytest.approx(others[1], rel=1e-5)
    for name, value in others[2].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("packing", [None, Packing(1024, 1024)], ids=["rows", "packed"])
def test_sequences_are_padded_to_a_multiple_and_nothing_changes(config_once, training_once, packing):
    """Padding of the recipe's multiple, behind rows and behind the last packed document, is seen by no token."""
    found, widths = {}, {}
    for multiple in (1, 192):
        policy = worker(config_once, training_once, packing=packing, sequence_multiple=multiple)
        seen = widths[multiple] = []
        policy.model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        found[multiple] = policy.get_logprobs(rows())["logprobs"]
    assert sorted(widths[192]) == ([1152] if packing else [192, 192, 192, 384])
    assert sorted(widths[1]) == ([896] if packing else [5, 30, 140, 270])
    torch.testing.assert_close(found[192], found[1], rtol=0, atol=1e-5)


def test_documents_do_not_see_each_other(config_once, training_once):
    """Other tokens in the first row change nothing in the others, to the bit: no attention, window or index crosses."""
    policy, data = worker(config_once, training_once, packing=Packing(1024, 1024)), rows()
    before = policy.get_logprobs(data)["logprobs"]
    data["input_ids"][0] = torch.randint(3, 160, (270,), generator=torch.Generator().manual_seed(9))
    after = policy.get_logprobs(data)["logprobs"]
    assert (after[0] != before[0]).any()
    torch.testing.assert_close(after[1:], before[1:], rtol=0, atol=1e-6)
