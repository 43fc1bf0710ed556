"""What `benchmarks/fuzz_layouts.py` draws, and what it calls different."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fuzz_layouts
from parity import CONFIG, VOCAB

from nemo_rl_dsv4.routes import RouterMode

HASHED = torch.arange(2 * VOCAB).reshape(VOCAB, 2) % CONFIG["n_routed_experts"]


def test_a_case_is_drawn_again_from_its_number_and_cases_differ():
    cases = [fuzz_layouts.draw(0, number, HASHED) for number in range(200)]
    again = fuzz_layouts.draw(0, 17, HASHED)
    assert fuzz_layouts.describe(again) == fuzz_layouts.describe(cases[17]) != fuzz_layouts.describe(cases[18])
    for one, two in zip(again.batches, cases[17].batches, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert {case.layout for case in cases} == set(fuzz_layouts.LAYOUTS)
    assert {case.settings["router"] for case in cases} == set(RouterMode)
    assert {call for case in cases for call in case.calls} == set(fuzz_layouts.CALLS)


def test_batches_are_what_a_trainer_takes():
    for number in range(50):
        case = fuzz_layouts.draw(3, number, HASHED)
        for batch in case.batches:
            ids, lengths = batch["input_ids"], batch["input_lengths"]
            inside = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
            assert len(ids) % case.global_batch_size == 0 and batch["sample_mask"].sum() > 0
            assert (ids[~inside] == 1).all() and (ids[inside] >= 3).all() and not batch["token_mask"][~inside].any()
            if case.settings["router"] is not RouterMode.OWN:
                routes = batch["routed_experts"]
                first = torch.arange(ids.shape[1]) < lengths.unsqueeze(1) - 1
                assert torch.equal(routes[:, :, 0][first].long(), HASHED[ids[first]]) and (routes[~first] == -1).all()


@pytest.mark.parametrize(
    ("name", "change", "differs"),
    [
        ("logprobs", 1e-5, False),
        ("reference logprobs", 1e-3, True),
        ("loss", float("nan"), True),
        ("grad_norm", 1e-2, False),  # of 10
        ("weights model.norm.weight", 1e-4, True),
    ],
)
def test_a_number_off_by_more_than_its_tolerance_is_said(name, change, differs):
    value, said = torch.tensor([10.0, -1.0]), []
    one, two = [("train", {name: value})], [("train", {name: value + torch.tensor([change, 0.0])})]
    assert (fuzz_layouts.compare(one, two, said.append) > 1) is differs
    assert fuzz_layouts.compare(one, one) == 0
    assert said == [] or f"call 0 train: {name} " in said[0]
    assert fuzz_layouts.compare(one, [("train", {})]) == float("inf")
