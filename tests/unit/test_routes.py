"""The contract of `routed_experts`: packing, checking, comparing."""

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.routes import RouterShape, RouterTally, as_signed, check_routes, count_overlap, pack_routes

SHAPE = RouterShape(layers=3, top_k=2, experts=8, hash_layers=(0,))


def good():
    """Two sequences of 5 and 3 tokens in 6 columns; every token but the last has a row."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 6, 3, 8, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    lengths = torch.tensor([5, 3])
    rows[torch.arange(6) >= lengths.unsqueeze(1) - 1] = -1
    return rows, torch.randint(0, 9, (2, 6), generator=generator), lengths


def test_overlap_of_two_top6_choices():
    """Case C063: rollout and trainer pick different top-6 experts; report overlap and the share without any.

    Row 0: same set in another order (1.0). Row 1: half shared (0.5). Row 2: disjoint (0.0). Row 3: not compared.
    """
    rollout = torch.arange(6).expand(4, 6)
    own = torch.tensor([[5, 4, 3, 2, 1, 0], [0, 1, 2, 9, 8, 7], [6, 7, 8, 9, 10, 11], [6, 7, 8, 9, 10, 11]])
    counts = count_overlap(rollout, own, torch.tensor([True, True, True, False]))
    assert counts.tolist() == [1.5, 1.0, 3.0]
    tally = RouterTally(*counts.tolist(), expected=4.0, missing=1.0)
    assert tally.metrics() == pytest.approx(
        {
            "router_overlap": 0.5,
            "router_no_overlap_share": 1 / 3,
            "router_missing_share": 0.25,
            "router_hash_mismatches": 0.0,
        }
    )


def test_tallies_add_up_and_an_empty_one_reports_nothing():
    parts = [RouterTally(3.0, 1.0, 4.0, 8.0, 2.0, 1.0), RouterTally(1.0, 0.0, 1.0, 2.0, 0.0, 0.0)]
    assert RouterTally.total(parts) == RouterTally(4.0, 1.0, 5.0, 10.0, 2.0, 1.0)
    assert RouterTally().metrics() == {}
    all_missing = RouterTally(expected=5.0, missing=5.0).metrics()
    assert all_missing == {"router_missing_share": 1.0, "router_hash_mismatches": 0.0}


def test_good_routes_pass():
    check_routes(*good(), SHAPE)
    routes, ids, lengths = good()
    routes[0, 1] = -1  # a gap in the capture
    routes[1, 3:] = 99  # behind the sequence: never read
    check_routes(routes, ids, lengths, SHAPE)


def test_hash_tables_may_name_an_expert_twice():
    routes, ids, lengths = good()
    routes[0, 0, 0] = 5
    check_routes(routes, ids, lengths, SHAPE)


def change(index, value):
    def apply(routes):
        routes[index] = torch.tensor(value, dtype=routes.dtype)
        return routes

    return apply


WRONG = {
    "length": (lambda r: r[:, :-1], r"\[2, 5, 3, 2\]; wanted integers of shape \[2, 6, 3, 2\]"),
    "layers": (lambda r: r[:, :, :2], r"\[2, 6, 2, 2\]; wanted"),
    "experts a token": (lambda r: r[..., :1], r"\[2, 6, 3, 1\]; wanted"),
    "type": (lambda r: r.float(), "is torch.float32"),
    "out of range": (
        change((1, 0, 2), [8, 1]),
        r"sequence 1, position 0, layer 2 is \[8, 1\], which is out of range; wanted 0 to 7",
    ),
    "negative": (change((0, 2, 1), [-2, 1]), r"position 2, layer 1 is \[-2, 1\], which is out of range"),
    "partly recorded": (change((0, 1, 1), [-1, 3]), r"position 1, layer 1 is \[-1, 3\], which holds -1 beside"),
    "twice": (change((0, 3, 2), [4, 4]), r"position 3, layer 2 is \[4, 4\], which names an expert twice"),
    "all missing": (lambda r: torch.full_like(r, -1), "no row is recorded"),
    "all zero": (torch.zeros_like, "every recorded id is 0; the engine returned its table without filling it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_routes_are_named(case):
    """C058, above all: a capture hook that is never called leaves zeros, which are valid ids."""
    spoil, message = WRONG[case]
    routes, ids, lengths = good()
    with pytest.raises(UserError, match=message):
        check_routes(spoil(routes), ids, lengths, SHAPE)


def test_requests_of_an_engine_are_packed_and_255_stays_an_expert():
    """vLLM returns uint8, in which -1 would be 255, the last of 256 experts."""
    first = torch.randint(0, 256, (4, 3, 2), dtype=torch.uint8)
    first[0, 0, 0] = 255
    packed = pack_routes([first, None], [5, 3], 6)
    assert packed.shape == (2, 6, 3, 2) and packed.dtype == torch.int16
    assert torch.equal(packed[0, :4], first.to(torch.int16)) and packed[0, 0, 0, 0] == 255
    assert (packed[0, 4:] == -1).all() and (packed[1] == -1).all()
    assert as_signed(first).dtype == torch.int16 and as_signed(packed) is packed


def test_a_request_of_the_wrong_length_is_named():
    routes = torch.zeros(5, 3, 2, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"request 1 has shape \[5, 3, 2\]; wanted \[4, 3, 2\]"):
        pack_routes([routes, routes], [6, 5], 8)
    with pytest.raises(UserError, match="the engine returned none for all 2 requests"):
        pack_routes([None, None], [6, 5], 8)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (65538, torch.int32, "request 1 holds 65538; wanted expert ids of 0 to 32767"),
        (-2, torch.int8, "request 1 holds -2"),
        (2.7, torch.float32, "request 1 is torch.float32; wanted expert ids"),
        (float("nan"), torch.float64, "request 1 is torch.float64"),
        (True, torch.bool, "request 1 is torch.bool"),
    ],
)
def test_ids_that_int16_would_change_are_refused(value, dtype, message):
    """65538 wrapped to expert 2, 2.7 was cut to 2 and NaN to 0: garbage of an engine became routes that look right."""
    good = torch.arange(6, dtype=torch.uint8).reshape(1, 3, 2)
    wrong = torch.ones(1, 3, 2, dtype=dtype)
    wrong[0, 1, 1] = value
    with pytest.raises(UserError, match=message):
        pack_routes([good, wrong], [2, 2], 4)


def test_routes_without_a_layer_dimension_are_refused():
    """A flat tensor ended in an IndexError."""
    with pytest.raises(UserError, match=r"has shape \[6\]; wanted \[tokens - 1, layers, top-k\]"):
        pack_routes([torch.arange(6)], [7], 8)


def test_missing_rows_and_sequences_of_one_token_are_packed():
    """The check of ids must leave -1, the largest id and an empty table alone."""
    gap = torch.tensor([[[-1, -1], [32767, 0]]])
    packed = pack_routes([gap, torch.empty(0, 2, 2, dtype=torch.int32)], [2, 1], 2)
    assert packed[0, 0].tolist() == [[-1, -1], [32767, 0]] and (packed[1] == -1).all()
