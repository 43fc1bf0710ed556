"""What a rank's process sees of its host; no GPU is there."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from nemo_rl_dsv4.policy import group as group_module
from nemo_rl_dsv4.policy.actor import PolicyActor
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.utils.hosts import LEAVE_GPUS

Rank: Any = PolicyActor.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rank_uses_its_own_gpu_or_its_place_among_those_of_its_host(monkeypatch):
    """The variable is set before the first GPU call: afterwards it would have no effect."""
    events: list[Any] = []
    shown = {"CUDA_VISIBLE_DEVICES": "none", "LOCAL_RANK": "none"}
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: events.append((d, os.environ["CUDA_VISIBLE_DEVICES"])))
    alone = Rank("cuda")
    assert events == [(0, "none")] and alone.device == torch.device("cuda", 0)
    events.clear()
    rank = Rank("cuda", True)
    assert events == []
    rank.see_host(1, ["4", "6"], "CUDA_VISIBLE_DEVICES")
    assert events == [(torch.device("cuda", 1), "4,6")] and rank.device == torch.device("cuda", 1)
    assert os.environ["LOCAL_RANK"] == "1"


def test_ray_hides_other_gpus_from_a_rank_unless_it_sees_its_host(monkeypatch):
    asked: list[tuple[dict, tuple]] = []

    def options(**given):
        return SimpleNamespace(remote=lambda *words: asked.append((given["runtime_env"]["env_vars"], words)))

    monkeypatch.setattr(group_module, "PolicyActor", SimpleNamespace(options=options))
    PolicyGroup(1, device="cuda", environment={"A": "1"})
    PolicyGroup(1, device="cuda", environment={"A": "1"}, sees_host=True)
    PolicyGroup(1, device="cpu", sees_host=True)
    left = [set(LEAVE_GPUS) <= set(variables) for variables, _ in asked]
    assert left == [False, True, False]
    assert [words for _, words in asked] == [("cuda", False), ("cuda", True), ("cpu", False)]
    assert [variables.get("A") for variables, _ in asked] == ["1", "1", None]
