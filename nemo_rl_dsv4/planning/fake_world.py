"""A process group of any size in one process: collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of `size` processes that do not exist (torch's `fake` backend).

    Raises:
        UserError: a real process group is already there.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("a plan needs a process of its own: torch.distributed is already initialized in this one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
