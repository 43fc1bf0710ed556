"""Which rank serves which worker, and how, on made-up hosts. A seat is written host:gpu."""

from __future__ import annotations

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.delivery import Delivery, Seat, Transport, plan_delivery


def seats(text: str) -> list[Seat]:
    return [Seat(*word.split(":")) for word in text.split()]


def plan(wanted: Transport, ranks: str, workers: str) -> Delivery:
    return plan_delivery(wanted, seats(ranks), seats(workers))


TWO_HOSTS = "h1:a h1:b h2:c h2:d"


@pytest.mark.parametrize(
    ("ranks", "workers", "transport", "served"),
    [
        # Engines on the policy's GPUs, of one host and of two: each from the rank on its GPU.
        ("h1:a h1:b h1:b", "h1:b h1:b h1:a", "cuda_ipc", (1, 1, 0)),
        (TWO_HOSTS, "h1:a h1:b h2:c h2:d", "cuda_ipc", (0, 1, 2, 3)),
        # Engines on other GPUs of the policy's hosts: from the first rank of their host.
        ("h1:a", "h1:a h1:b", "shared_memory", (0, 0)),
        ("h1:a h1:b h2:a h2:b", "h2:x h1:x h2:y", "shared_memory", (2, 0, 2)),
        ("h1:cpu h2:cpu", "h2:cpu h1:cpu", "shared_memory", (1, 0)),
        # GPUs that two hosts call by the same name are two GPUs.
        ("h1:0 h2:0", "h2:0", "cuda_ipc", (1,)),
        # Engines on hosts of their own, all of them or one.
        (TWO_HOSTS, "h3:e h3:f h4:g", "broadcast", (0, 0, 0)),
        (TWO_HOSTS, "h1:a h3:e", "broadcast", (1, 1)),
        ("h1:0", "h2:0", "broadcast", (0,)),
        ("h1:cpu h2:cpu", "h3:cpu h3:cpu", "broadcast", (0, 0)),
    ],
)
def test_auto_takes_the_nearest_way_that_reaches_every_worker(ranks, workers, transport, served):
    found = plan("auto", ranks, workers)
    assert (found.transport, found.served) == (transport, served)
    assert sum(found.receivers) == len(served) and len(found.receivers) == found.ranks == len(ranks.split())


def test_broadcast_has_no_two_ends_on_one_gpu():
    assert plan("broadcast", "h:a h:b", "h:c h:d") == Delivery("broadcast", (0, 0), 2)
    assert plan("broadcast", "h:a h:b", "h:a h:c").served == (1, 1)
    crossed = plan("broadcast", "h:a h:b", "h:a h:b")
    assert crossed.served == (1, 0)
    assert [crossed.place(worker) for worker in (0, 1)] == [(1, 2), (1, 2)]
    assert [plan("broadcast", "h:a", "h:c h:d").place(worker) for worker in (0, 1)] == [(1, 3), (2, 3)]
    with pytest.raises(UserError, match="the one training rank and an engine worker are both on GPU a of host h"):
        plan("broadcast", "h:a", "h:a")


def test_a_worker_elsewhere_is_served_although_every_rank_shares_its_gpu():
    """It was looked for among the ranks' GPUs, and not found there: a ValueError."""
    found = plan("auto", "h1:a h1:b", "h1:a h1:b h2:c")
    assert found == Delivery("broadcast", (1, 0, 0), 2)
    assert [found.place(worker) for worker in range(3)] == [(1, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("wanted", "ranks", "workers", "message"),
    [
        ("cuda_ipc", "h:a", "h:a h:b", r"is cuda_ipc, but no training rank is on GPU b of host h .*ranks are on a of"),
        ("cuda_ipc", "h1:0", "h2:0", "no training rank is on GPU 0 of host h2"),
        ("cuda_ipc", "h:cpu", "h:cpu", "GPU cpu"),
        ("shared_memory", "h1:a", "h1:b h2:c", "is shared_memory, but no training rank is on host h2"),
        ("broadcast", "h1:a", "h2:cpu", "wanted each worker on a GPU of its own"),
        ("auto", "h1:a", "h2:b h2:b", "engine workers on b of host h2, b of host h2; wanted each worker on a GPU"),
    ],
)
def test_a_way_that_does_not_reach_a_worker_is_refused(wanted, ranks, workers, message):
    with pytest.raises(UserError, match=message):
        plan(wanted, ranks, workers)


def test_the_log_says_why_auto_takes_a_longer_way(caplog):
    with caplog.at_level("INFO"):
        plan("auto", "h1:a", "h1:b")
        plan("auto", "h1:a", "h2:b")
        plan("auto", "h1:a", "h1:a")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "refit through shared memory",
        "refit by broadcast",
    ]
