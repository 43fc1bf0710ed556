"""Pack a stream of weights into buckets of bounded size that an engine can load one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import fused_group
from nemo_rl_dsv4.refit.manifest import padded
from nemo_rl_dsv4.refit.report import Stream

Items = list[tuple[str, torch.Tensor]]


def pack_buckets(stream: Stream, capacity_bytes: int) -> Iterator[Items]:
    """Yield lists of neighbours of at most `capacity_bytes`, in stream order.

    A weight, its scale and its fused partners (`wq_a`+`wkv`, a compressor's `wkv`+`wgate`, `w1`+`w3`) are never split:
    an engine quantizes or concatenates them together. Load all buckets, then finalize once.

    Raises:
        UserError: one such group alone exceeds the capacity.
    """
    for _, bucket, _ in numbered_buckets(stream, capacity_bytes):
        yield bucket


def numbered_buckets(stream: Stream, capacity_bytes: int) -> Iterator[tuple[int, Items, bool]]:
    """Yield (number, bucket, whether it is the last) as `pack_buckets` does.

    A consumer that clears a bucket once it is done with it keeps one in memory, else two.
    """
    index, bucket, used = 0, [], 0
    for label, members in groupby(stream, key=lambda item: fused_group(item[0])):
        group = list(members)
        size = sum(padded(tensor.numel() * tensor.element_size()) for _, tensor in group)
        if size > capacity_bytes:
            raise UserError(
                f"refit: {label} takes {size} bytes together and a bucket holds {capacity_bytes}; "
                "raise refit_buffer_size_gb"
            )
        if used + size > capacity_bytes:
            yield index, bucket, False
            index, bucket, used = index + 1, [], 0
        bucket += group
        used += size
    if bucket:
        yield index, bucket, True


def bucket_bytes(refit_buffer_size_gb: float) -> int:
    """Bytes of a bucket of `refit_buffer_size_gb` GiB."""
    return int(refit_buffer_size_gb * 2**30)
