"""Buckets keep what belongs together together."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import fused_group
from nemo_rl_dsv4.refit import export_weights, pack_buckets


def test_buckets_hold_whole_groups_and_lose_nothing(training_state: dict[str, torch.Tensor]) -> None:
    """Case C050: a weight and its scale, or two fused partners, landed in different buckets."""
    stream = list(export_weights(training_state, "vllm-hopper"))
    capacity = 120_000
    buckets = list(pack_buckets(stream, capacity))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in stream]
    for bucket in buckets:
        assert 0 < sum(t.numel() * t.element_size() for _, t in bucket) <= capacity
    seen: dict[str, int] = {}
    for number, bucket in enumerate(buckets):
        for name, _ in bucket:
            assert seen.setdefault(fused_group(name), number) == number
    # Greedy: no two neighbouring buckets would have fitted into one.
    sizes = [sum(t.numel() * t.element_size() for _, t in bucket) for bucket in buckets]
    first = [sum(t.numel() * t.element_size() for n, t in b if fused_group(n) == fused_group(b[0][0])) for b in buckets]
    assert all(size + following > capacity for size, following in zip(sizes, first[1:], strict=False))


def test_group_larger_than_a_bucket_is_refused(training_state: dict[str, torch.Tensor]) -> None:
    stream = export_weights(training_state, "vllm-hopper")
    with pytest.raises(
        UserError, match=r"embed takes 40960 bytes together and a bucket holds 1000; raise refit_buffer"
    ):
        list(pack_buckets(stream, 1000))
