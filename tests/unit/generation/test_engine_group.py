"""Dealing requests over engines: order, progress, a dying engine, a silent one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from nemo_rl_dsv4.generation import engine_group
from nemo_rl_dsv4.generation.engine_group import EngineGroup


@dataclass
class Spec:
    """`dies`, `dies_building`: files; while one exists the engine that finds it removes it and dies."""

    batch_size: int = 2
    capture_routes: bool = False
    sleeps: float = 0.0
    dies: list[str] = field(default_factory=list)
    dies_building: list[str] = field(default_factory=list)


@dataclass
class Params:
    """As much of the sampling parameters as the group reads; the engines then import no torch, which takes seconds."""

    max_new_tokens: int = 3
    temperature: float = 1.0


@ray.remote
class Echo:
    """Answers a prompt with its length, the version of its weights, and the seed."""

    def build(self, spec: Spec) -> str:
        self.spec, self.version = spec, 0
        self.die(spec.dies_building)
        return "echo"

    def die(self, files: list[str]) -> None:
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # another engine was faster
                os.remove(path)
                os._exit(1)

    def update_weights(self, version: int) -> dict[str, Any]:
        self.version = version
        counts = {"tensors": 1, "quantized": 0, "bytes": 8, "seconds": 0.5, "checksum": "not a number"}
        counts |= {"findings": ["one"], "notes": ["decided"]}
        return {**counts, "phases": {"load": 0.25}, "phase_bytes": {"load": 8}}

    def generate(self, prompts: list[list[int]], params: Any, seed: int, rows: list[int]) -> list[Any]:
        self.die(self.spec.dies)
        time.sleep(self.spec.sleeps)
        made = [[len(prompt), self.version, seed + row] for prompt, row in zip(prompts, rows, strict=True)]
        return [SimpleNamespace(tokens=tokens, logprobs=[-1.0] * 3, truncated=False) for tokens in made]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def group(spec: Spec, **options: Any) -> EngineGroup:
    made = EngineGroup(lambda _: Echo.options(num_cpus=0.1).remote(), 2, Params(), pad_id=0, **options)
    assert made.build(spec) == "echo"
    logged = made.update_weights(7)
    assert (logged["bytes"], logged["seconds_load"], logged["bytes_load"], logged["findings"]) == (8.0, 0.25, 8.0, 2.0)
    return made


def test_what_a_refit_decided_is_said_once_for_all_engines(caplog: pytest.LogCaptureFixture) -> None:
    group(Spec())
    assert [record.message for record in caplog.records] == ["refit: decided"]


def end(actor: Any) -> None:
    """Kill a process and wait for its end: it may answer one more call before."""
    ray.kill(actor)
    for _ in range(600):
        try:
            ray.get(actor.__ray_ready__.remote())
        except RayActorError:
            return
        time.sleep(0.05)
    raise AssertionError("the killed process goes on answering")


def answers(rollout: EngineGroup) -> list[list[int]]:
    lengths = torch.tensor([3, 1, 2, 4, 2])
    data = {"input_ids": torch.ones(5, 4, dtype=torch.long), "input_lengths": lengths}
    out = rollout.generate(data, greedy=False, seed=10)
    assert out["output_ids"].shape == (5, 7)
    assert out["unpadded_sequence_lengths"].tolist() == (lengths + 3).tolist()
    return [out["output_ids"][row, n : n + 3].tolist() for row, n in enumerate(lengths.tolist())]


WANTED = [[3, 7, 10], [1, 7, 11], [2, 7, 12], [4, 7, 13], [2, 7, 14]]


def test_rows_come_back_in_order_whoever_answered() -> None:
    seen: list[int] = []
    rollout = group(Spec(), on_progress=seen.append)
    assert answers(rollout) == WANTED
    assert sorted(seen) == [1, 2, 2]
    rollout.shutdown()


def test_a_dead_engine_is_replaced_at_the_same_policy_version(tmp_path: Path) -> None:
    """Its requests run again with the same draws; the batch is the one without a death."""
    (tmp_path / "die").touch()
    rollout = group(Spec(dies=[str(tmp_path / "die")]))
    before = list(rollout.actors)
    assert answers(rollout) == WANTED
    assert rollout.restarts == 1
    assert len(set(map(str, before)) & set(map(str, rollout.actors))) == 1
    rollout.shutdown()


def test_a_refit_that_finds_an_engine_dead_is_made_again_for_all() -> None:
    """It died after its last batch: nobody has asked it for anything since."""
    rollout = group(Spec())
    kept, dead = rollout.actors
    end(dead)
    assert rollout.update_weights(8)["bytes"] == 8.0
    assert rollout.restarts == 1 and rollout.actors[0] is kept and rollout.actors[1] is not dead
    assert answers(rollout) == [[length, 8, seed] for length, _, seed in WANTED]
    rollout.shutdown()


def test_a_policy_that_sends_is_asked_again_with_the_new_engine(tmp_path: Path) -> None:
    """And one that dies as it starts is started once more."""

    class Sent:
        asked: ClassVar[list[list[Any]]] = []

        def deliver(self, engines: list[Any]) -> list[dict[str, Any]]:
            self.asked.append(list(engines))
            return ray.get([engine.update_weights.remote(9) for engine in engines])

    rollout, sent = group(Spec(dies_building=[str(tmp_path / "die")])), Sent()
    dead = rollout.actors[0]
    end(dead)
    (tmp_path / "die").touch()
    rollout.update_weights(sent)
    assert rollout.restarts == 2 and [len(engines) for engines in sent.asked] == [2, 2]
    assert dead in sent.asked[0] and sent.asked[1] == rollout.actors and dead not in rollout.actors
    assert answers(rollout) == [[length, 9, seed] for length, _, seed in WANTED]
    rollout.shutdown()


def test_another_process_that_died_in_a_refit_ends_it() -> None:
    """Engines are all there: starting one again would help nobody."""

    class Sent:
        asked = 0

        def deliver(self, engines: list[Any]) -> list[dict[str, Any]]:
            self.asked += 1
            raise RayActorError(error_msg="a rank of the policy")

    rollout, sent = group(Spec()), Sent()
    with pytest.raises(RayActorError, match="a rank of the policy"):
        rollout.update_weights(sent)
    assert (sent.asked, rollout.restarts) == (1, 0)
    rollout.shutdown()


def test_engines_that_keep_dying_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_group, "MAX_RESTARTS", 1)
    files = [tmp_path / str(n) for n in range(4)]
    for path in files:
        path.touch()
    rollout = group(Spec(dies=[str(path) for path in files]))
    with pytest.raises(RuntimeError, match="died 2 times"):
        answers(rollout)
    rollout.shutdown()


def test_engines_that_hang_end_the_run() -> None:
    rollout = group(Spec(sleeps=30.0), timeout=0.5)
    with pytest.raises(
        RuntimeError, match=r"no rollout engine finished a task within 0.5 s; 2 of them are busy with 3 requests"
    ):
        answers(rollout)
    rollout.shutdown()
