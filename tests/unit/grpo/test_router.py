import pytest
import torch

from nemo_rl_dsv4.grpo.router import router_overlap


def test_overlap_of_two_top6_choices():
    """Case C063: rollout and trainer pick different top-6 experts; report overlap and the share without any.

    Token 0: same set in another order (1.0). Token 1: half shared (0.5). Token 2: disjoint (0.0). Token 3: masked.
    """
    rollout = torch.tensor([[[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]]])
    train = torch.tensor([[[5, 4, 3, 2, 1, 0]], [[0, 1, 2, 9, 8, 7]], [[6, 7, 8, 9, 10, 11]], [[6, 7, 8, 9, 10, 11]]])
    found = router_overlap(rollout, train, torch.tensor([1, 1, 1, 0]))
    assert found.metrics() == pytest.approx({"router_overlap": 0.5, "router_no_overlap_share": 1 / 3})


def test_parts_add_up_and_missing_rows_do_not_count():
    """-1 means the rollout did not record the row: it is no disagreement."""
    generator = torch.Generator().manual_seed(1)
    rollout, train = (torch.rand(2, 8, 3, 6, generator=generator).argsort(-1)[..., :2] for _ in range(2))
    rollout[0, :4] = -1
    mask = torch.ones(2, 8)
    whole = router_overlap(rollout, train, mask)
    parts = router_overlap(rollout[:1], train[:1], mask[:1]).plus(router_overlap(rollout[1:], train[1:], mask[1:]))
    assert whole == pytest.approx(parts)
    assert whole.pairs == (16 - 4) * 3
    assert router_overlap(rollout[:1, :4], train[:1, :4], mask[:1, :4]).metrics() == {}


def test_a_route_that_was_never_captured_is_refused():
    """C058: a capture hook that is not called leaves zeros; they counted as full overlap with any set holding 0."""
    train = torch.arange(6).expand(4, 3, 6)
    with pytest.raises(ValueError, match=r"rollout experts at \[0, 0\] are \[0, 0, 0, 0, 0, 0\]; wanted distinct ids"):
        router_overlap(torch.zeros(4, 3, 6), train, torch.ones(4))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        router_overlap(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.ones(2))
