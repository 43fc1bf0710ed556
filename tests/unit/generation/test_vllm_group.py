"""vLLM engines as a group: which Python, which GPUs, where weights lie. The engines themselves run on a GPU."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayActorError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation import engine_group, vllm
from nemo_rl_dsv4.generation.engine_group import EngineGroup
from nemo_rl_dsv4.generation.python_of_engines import python_problem
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm_settings import MAKE_VLLM


def test_python_of_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="neither .venv-vllm/bin/python nor vllm in this environment; make one with"):
        vllm.engine_python(None)
    with pytest.raises(UserError, match="policy.dsv4.vllm_python is 'nowhere', no such file"):
        vllm.engine_python("nowhere")
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\necho python\n")
    own.chmod(0o755)
    assert vllm.engine_python(None) == str(own)
    own.unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert vllm.engine_python(None) == sys.executable


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\necho python,vllm\n", f"a Python without vllm; make vLLM's environment with `{MAKE_VLLM}`"),
        ("#!/bin/sh\necho python,vllm,ray\n", "a Python without vllm and ray"),
        ("#!/bin/sh\necho python\nexit 1\n", "no Python: it does not run `-c`"),
        ("#!/bin/sh\necho hello\n", "no Python: it does not run `-c`"),
        ("#!/nowhere/python\n", "a program that does not start as a Python does"),
    ],
)
def test_a_program_that_engines_cannot_run_with_is_named(tmp_path: Path, script: str, problem: str) -> None:
    """Ray started it as an actor, which died without saying why."""
    program = tmp_path / "python"
    program.write_text(script)
    with pytest.raises(UserError, match="vllm_python is .*, a file that cannot be executed"):
        vllm.engine_python(str(program))
    program.chmod(0o755)
    with pytest.raises(UserError, match=f"policy.dsv4.vllm_python is '{program}', {re.escape(problem)}"):
        vllm.engine_python(str(program))
    assert python_problem(sys.executable) in (
        None,
        f"a Python without vllm; make vLLM's environment with `{MAKE_VLLM}`",
    )


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> vllm.VllmGeneration:
    monkeypatch.setattr(vllm, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(EngineGroup, "__init__", lambda self, *args, **options: setattr(self, "actors", []))
    return vllm.VllmGeneration(SamplingParams(1), pad_id=0, places=[], python="python", environment={})


def test_buckets_of_older_versions_go_once_the_new_ones_are_loaded(group, tmp_path, monkeypatch) -> None:
    """Removed before, a load that fails would leave a restarted engine without any weights."""
    for version in (1, 2):
        group.bucket_folder(version).mkdir()
    loads = []

    def load(self, weights: str) -> dict[str, float]:
        loads.append((weights, group.bucket_folder(1).is_dir()))
        return {"bytes": 8.0}

    monkeypatch.setattr(EngineGroup, "update_weights", load)
    assert group.update_weights(group.bucket_folder(2)) == {"bytes": 8.0}
    assert loads == [(str(group.bucket_folder(2)), True)]
    assert [path.name for path in group.bucket_folder(2).parent.iterdir()] == ["version-2"]
    group.shutdown()
    assert not list(tmp_path.iterdir())


def test_a_profile_is_asked_where_the_gpu_is(monkeypatch) -> None:
    """`auto` on a driver without a GPU has no answer of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from nemo_rl_dsv4.numerics.devices import profile_of_device

    with pytest.raises(ValueError, match="resolved on the worker that owns one"):
        profile_of_device()


class SleepyActor:
    """An engine that notes what is asked of it."""

    def __init__(self, notes: list[str]) -> None:
        def remote(name):
            return SimpleNamespace(remote=lambda *words: notes.append(" ".join((name, *words))))

        self.sleep, self.wake_up = remote("sleep"), remote("wake")


@pytest.fixture
def sleepy(group, monkeypatch):
    notes: list[str] = []
    group.sleeps, group.actors = True, [SleepyActor(notes)]
    monkeypatch.setattr(vllm, "get", lambda answers: answers)

    def load(self, weights: str) -> dict[str, float]:
        notes.append(f"load {Path(weights).name}")
        if not Path(weights).is_dir():
            raise UserError("no buckets")
        return {}

    monkeypatch.setattr(EngineGroup, "update_weights", load)
    return group, notes


def test_a_sleeping_engine_gets_weights_before_its_cache(sleepy) -> None:
    """A second rollout without a refit in between, as dynamic sampling does, needs the old weights again."""
    group, notes = sleepy
    group.finish_generation()
    assert notes == []  # nothing to load again yet
    group.bucket_folder(1).mkdir()
    group.update_weights(group.bucket_folder(1))
    for _ in range(2):
        group.prepare_for_generation()
        group.finish_generation()
        group.finish_generation()
    assert notes == ["load version-1", "sleep", "wake weights", "load version-1", "wake kv_cache", "sleep"]
    group.bucket_folder(2).mkdir()
    notes.clear()
    group.update_weights(group.bucket_folder(2))
    group.prepare_for_generation()
    assert notes == ["wake weights", "load version-2", "wake kv_cache"]


def test_a_failed_load_leaves_a_sleeping_engine_asleep(sleepy) -> None:
    group, notes = sleepy
    group.bucket_folder(1).mkdir()
    group.update_weights(group.bucket_folder(1))
    group.finish_generation()
    notes.clear()
    with pytest.raises(UserError, match="no buckets"):
        group.update_weights(group.bucket_folder(2))
    assert notes == ["wake weights", "load version-2", "sleep"] and group.asleep
    group.prepare_for_generation()
    assert notes[3:] == ["wake weights", "load version-1", "wake kv_cache"]


def test_an_engine_that_died_asleep_is_started_again_when_the_others_wake(sleepy, monkeypatch) -> None:
    """A dead one has nothing to give back, and a new one is awake: neither is asked twice."""
    group, notes = sleepy
    dead = SimpleNamespace(sleep=Answer(RayActorError()), wake_up=Answer(RayActorError()))
    group.actors.append(dead)
    group._spec, group.restarts = None, 0
    group._start = lambda number: SimpleNamespace(build=Answer(notes.append(f"start {number}")), wake_up=Answer(None))
    monkeypatch.setattr(engine_group, "kill", lambda actors: None)

    def answered(answers: list[object]) -> list[object]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    monkeypatch.setattr(vllm, "get", answered)
    monkeypatch.setattr(engine_group, "get", answered)
    group.bucket_folder(1).mkdir()
    group.update_weights(group.bucket_folder(1))
    group.finish_generation()
    group.prepare_for_generation()
    assert notes == ["load version-1", "sleep", "wake weights", "start 1", "load version-1", "wake kv_cache"]
    assert group.restarts == 1 and group.actors[1] is not dead


def test_an_engine_that_dies_as_its_cache_wakes_gets_the_weights_of_the_others(group, monkeypatch) -> None:
    """They have committed them by then: nothing else would bring the new one any."""

    def answered(answers: list[object]) -> list[object]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def actor(name: str, cache: object = None) -> SimpleNamespace:
        wake_up = SimpleNamespace(remote=lambda tag: cache if tag == "kv_cache" else None)
        return SimpleNamespace(name=name, wake_up=wake_up, sleep=Answer(None), build=Answer(None))

    class Sent:
        def deliver(self, actors: list[SimpleNamespace]) -> list[dict]:
            held.update({one.name: "new" for one in actors})
            counts = {"tensors": 3, "quantized": 1, "bytes": 8, "seconds": 1.0, "findings": []}
            return [{**counts, "phases": {}, "phase_bytes": {}} for _ in actors]

    held = dict.fromkeys(("a", "b", "c"), "old")
    group.sleeps, group.asleep, group.actors = True, True, [actor("a"), actor("b", RayActorError())]
    group._spec, group.restarts, group._start = None, 0, lambda number: actor("c")
    for module in (vllm, engine_group):
        monkeypatch.setattr(module, "get", answered)
    monkeypatch.setattr(engine_group, "kill", lambda actors: None)
    group.update_weights(Sent())
    assert [one.name for one in group.actors] == ["a", "c"] and held["a"] == held["c"] == "new" and not group.asleep


def test_why_a_load_failed_is_not_lost_when_sleep_fails_too(sleepy, monkeypatch, caplog) -> None:
    group, _ = sleepy
    group.bucket_folder(1).mkdir()
    group.update_weights(group.bucket_folder(1))
    group.finish_generation()
    monkeypatch.setattr(group, "_on_all", lambda method, *args: failing() if method == "sleep" else [])

    def failing() -> None:
        raise UserError("less free memory than before")

    with pytest.raises(UserError, match="no buckets"):
        group.update_weights(group.bucket_folder(2))
    assert "could not be put back to sleep (less free memory than before)" in caplog.text


class Answer:
    """A method of an actor, and what it answers."""

    def __init__(self, value: object) -> None:
        self._value = value

    def remote(self, *words: object) -> object:
        return self._value


def test_weights_that_are_sent_leave_no_buckets_behind(group, monkeypatch) -> None:
    """A policy that sends hands over itself, for engines that need the weights again; a folder of before goes."""
    group.bucket_folder(1).mkdir()
    asked = []

    class Sent:
        def deliver(self, actors: list[str]) -> list[dict]:
            asked.append(list(actors))
            counts = {"tensors": 3, "quantized": 1, "bytes": 8, "seconds": 1.0, "findings": []}
            return [{**counts, "phases": {"load": 0.5}, "phase_bytes": {}} for _ in actors]

    group.actors = ["a", "b"]
    logged = group.update_weights(Sent())
    assert (logged["bytes"], logged["seconds_load"]) == (8.0, 0.5)
    assert not group.bucket_folder(1).exists()
    group._spec, group.restarts, group._start = None, 0, lambda number: Revived()
    monkeypatch.setattr(engine_group, "get", lambda refs: refs)
    monkeypatch.setattr(engine_group, "kill", lambda actors: None)
    group._revive("b", RuntimeError("it died"))
    assert asked == [["a", "b"], [group.actors[1]]]


class Revived:
    """An engine's process that has just started."""

    class build:
        @staticmethod
        def remote(spec: None) -> None:
            return None
