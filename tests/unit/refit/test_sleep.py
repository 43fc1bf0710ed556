"""Memory given back and taken again around a refit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.sleep import refit_asleep, release_workspaces


def test_kv_cache_keeps_its_size() -> None:
    """Case C086: at the same utilization the pool came out larger at wake-up than memory was free."""
    from nemo_rl_dsv4.generation.vllm_settings import VllmSpec, engine_arguments
    from nemo_rl_dsv4.numerics import get_profile

    profile = get_profile("vllm-hopper")
    spec = VllmSpec(model="m", profile=profile.name, sleep_mode=True, kv_cache_memory_bytes=8 << 30)
    arguments = engine_arguments(spec, profile)
    assert arguments["kv_cache_memory_bytes"] == 8 << 30
    assert arguments["enable_sleep_mode"]
    in_recipe = replace(spec, kv_cache_memory_bytes=None, engine_arguments={"kv_cache_memory_bytes": 4 << 30})
    assert engine_arguments(in_recipe, profile)["kv_cache_memory_bytes"] == 4 << 30
    for unset in (replace(spec, kv_cache_memory_bytes=None), replace(spec, kv_cache_memory_bytes=0)):
        with pytest.raises(UserError, match="kv_cache_memory_bytes is (not set|0; wanted)"):
            engine_arguments(unset, profile)


def test_workspaces_are_dropped_on_offload() -> None:
    """Case C087: 68 GiB stayed on the GPU after an offload, in the workspaces of FP8 modules."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    held: Any = model[1]
    held._fp8_workspaces = {
        "weight": torch.zeros(256, dtype=torch.uint8),
        "other": SimpleNamespace(_data=torch.zeros(64, dtype=torch.uint8), _scale=torch.zeros(2), name="w"),
    }
    assert release_workspaces(model) == 256 + 64 + 8
    assert held._fp8_workspaces == {}
    assert release_workspaces(model) == 0


class Sleeper:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


def test_weights_wake_first_and_a_failed_refit_sleeps_again() -> None:
    engine = Sleeper()
    assert refit_asleep(engine, lambda: engine.calls.append("refit") or 7) == 7
    assert engine.calls == [("wake", "weights"), "refit", ("wake", "kv_cache"), "reset"]

    def broken() -> int:
        raise UserError("no sender")

    engine.calls.clear()
    with pytest.raises(UserError, match="no sender"):
        refit_asleep(engine, broken)
    assert engine.calls == [("wake", "weights"), ("sleep", 2)]
