"""Cutting batches by length."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.microbatch import check_lengths, cut_rows, length_groups, split_into


def batch(lengths, width):
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    return {"input_ids": ids, "input_lengths": torch.tensor(lengths), "sample_mask": torch.ones(len(lengths))}


def as_lists(groups):
    return [group.tolist() for group in groups]


def test_groups_are_short_and_alike():
    lengths = torch.tensor([40, 150, 42, 41, 148, 39])
    assert as_lists(length_groups(lengths, 8)) == [[5, 0, 3, 2], [4, 1]]
    assert as_lists(length_groups(lengths, 3)) == [[5, 0, 3], [2], [4, 1]]


def test_every_row_is_in_exactly_one_group():
    lengths = torch.randint(1, 300, (57,), generator=torch.Generator().manual_seed(0))
    groups = length_groups(lengths, 7)
    assert sorted(torch.cat(groups).tolist()) == list(range(57))
    assert max(len(group) for group in groups) <= 7
    assert all(lengths[group].max() <= 1.5 * lengths[group].min() for group in groups)


def test_splitting_reaches_the_count_of_a_peer():
    parts = split_into([torch.tensor([0, 1, 2, 3]), torch.tensor([4])], 4)
    assert len(parts) == 4
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="holds 5 sequences but a peer needs 6"):
        split_into(parts, 6)


def test_rows_are_cut_to_their_longest_and_padded_to_the_multiple():
    data = batch([3, 9, 4], 12)
    (short, long) = cut_rows(data, [torch.tensor([0, 2]), torch.tensor([1])], multiple=8)
    assert short.length == 8 and short.data["input_ids"].tolist() == data["input_ids"][[0, 2], :8].tolist()
    assert short.data["sample_mask"].tolist() == [1.0, 1.0]
    assert long.length == 16
    assert long.data["input_ids"][0].tolist() == [*data["input_ids"][1].tolist(), 0, 0, 0, 0]


def test_padded_routes_are_not_recorded():
    """Filled with 0 like everything else, padding claimed to have been routed to expert 0."""
    data = batch([9], 12) | {"routed_experts": torch.ones(1, 12, 2, 2, dtype=torch.int16)}
    (part,) = cut_rows(data, [torch.tensor([0])], multiple=16)
    assert part.data["routed_experts"].shape == (1, 16, 2, 2)
    assert (part.data["routed_experts"][:, :12] == 1).all() and (part.data["routed_experts"][:, 12:] == -1).all()


@pytest.mark.parametrize("lengths", [[0, 3], [3, 13]])
def test_impossible_lengths_are_named(lengths):
    with pytest.raises(UserError, match="wanted 1..12"):
        check_lengths(batch(lengths, 12))
