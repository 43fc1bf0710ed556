"""GPU memory that a policy's processes keep for themselves, and when they give it back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from nemo_rl_dsv4.policy import group as module_under_test
from nemo_rl_dsv4.policy import spec as policy_spec
from nemo_rl_dsv4.policy.actor import PolicyActor
from nemo_rl_dsv4.policy.group import PolicyGroup

Rank: Any = PolicyActor.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rank_keeps_no_freed_memory_after_it_was_built(monkeypatch):
    """Seen on an H200: a warm start left 71 GB in PyTorch's cache, and another process ran out of memory."""
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("released"))
    rounding = SimpleNamespace(summary=lambda: "")
    monkeypatch.setattr(
        policy_spec, "build_worker", lambda *_: events.append("built") or SimpleNamespace(rounding=rounding)
    )
    for device, expected in (("cuda", ["built", "released"]), ("cpu", ["built"])):
        events.clear()
        rank = Rank.__new__(Rank)
        rank.device, rank.address = torch.device(device), "10.0.0.1"
        rank.build(SimpleNamespace(device=device))
        assert events == expected


def test_ranks_on_gpus_release_memory_when_training_has_finished(monkeypatch):
    """An engine on the same GPU, or one that wakes up, needs it for the rollout."""
    monkeypatch.setattr(module_under_test, "get", lambda refs: refs)
    released = []
    actors = [SimpleNamespace(release_memory=SimpleNamespace(remote=lambda i=i: released.append(i))) for i in range(2)]
    group = PolicyGroup.__new__(PolicyGroup)
    group.device, group.actors, group.submitting = "cpu", actors, threading.RLock()
    group.finish_training()
    assert released == []
    group.device = "cuda"
    group.finish_training()
    assert released == [0, 1]
