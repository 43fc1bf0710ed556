"""Training ranks with shards serve the workers of an engine, as `vllm_refit.py` measures it; ranks are threads here."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit import StreamTally, export_weights
from nemo_rl_dsv4.refit.report import RefitReport
from nemo_rl_dsv4.refit.staging import StagedWeights
from nemo_rl_dsv4.refit.vllm_extension import RefitWorkerExtension

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


class Weights:
    """Called with a version on each rank; a version is its number added to one norm."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def __call__(self, version: int) -> dict[str, torch.Tensor]:
        return {name: value + version if name == "model.norm.weight" else value for name, value in self.state.items()}


class Engine:
    """Two workers that stage what they receive; each is called in a thread, as vLLM's are in a process."""

    def __init__(self, expected: dict[str, tuple[int, ...]]) -> None:
        self.workers = [RefitWorkerExtension() for _ in range(2)]
        self.held: list[Any] = [None, None]
        for number, worker in enumerate(self.workers):
            model = torch.nn.Linear(1, 1)

            def commit(staged: StagedWeights, number: int = number) -> RefitReport:
                staged.check_complete()
                self.held[number] = staged
                return RefitReport(1, 1, staged.bytes, 0.0, staged.checksum, staged.version)

            live: Any = SimpleNamespace(
                engine=SimpleNamespace(rank=number, model=model, expected=expected),
                apply=lambda staged, skip_repointing=False, commit=commit: commit(staged),
            )
            worker._dsv4_refit = live

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple = (), kwargs: Any = None) -> list[Any]:
        found: list[Any] = [None, None]

        def call(number: int) -> None:
            found[number] = getattr(self.workers[number], method)(*args, **(kwargs or {}))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.fixture
def launch(training_once: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Ranks as threads of this process, with real collectives between them."""
    from refit_ranks import Rank, serve

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def run(rank: int, link: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        serve(Rank(rank, 2, torch.device("cpu"), Weights(training_once), 400_000), link)

    def start(rank: int, link: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=(rank, link), daemon=True)
        thread.start()
        return thread

    yield start
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    _uninstall_threaded_pg()


def test_ranks_with_shards_serve_the_workers_of_an_engine(
    launch: Any, training_once: dict[str, torch.Tensor], official_once: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Over files and by broadcast, twice each; a NaN on one rank reaches nobody."""
    from refit_ranks import Ranks
    from vllm_refit import Served

    weights = Weights(training_once)
    engine = Engine({name: tuple(value.shape) for name, value in official_once.items()})
    ranks = Ranks(2, launch)
    number = 0
    try:
        for transport in ("folder", "broadcast"):
            served = Served(engine, ranks, transport, 2, tmp_path)
            for version in (1, 2):
                ranks.call("load", version)
                number += 1
                _, received = served.refit(number)
                tally = StreamTally()
                list(tally.watch(export_weights(weights(version), "vllm-hopper")))
                assert [report["checksum"] for report in received] == [tally.report().checksum] * 2
        before = list(engine.held)
        ranks.call("load", 3, spoiled=True)
        with pytest.raises(UserError, match=r"training rank|worker 0|is nan"):
            served.refit(number + 1)
        assert all(held is old for held, old in zip(engine.held, before, strict=True))
        ranks.call("load", 4)
        assert [report["version"] for report in served.refit(number + 2)[1]] == [number + 2] * 2
    finally:
        ranks.end()


def measured(value: float = -1.0, tokens: int = 5) -> dict[str, torch.Tensor]:
    """What one engine measured."""
    return {"prompt": torch.full((4,), value), "sampled": torch.full((3,), value), "tokens": torch.full((3,), tokens)}


def compared(folder: Path, refitted: object, fresh: object) -> int:
    torch.save(refitted, folder / "refit.pt")
    torch.save(fresh, folder / "fresh.pt")
    return importlib.import_module("vllm_refit").compare(folder, [])


def test_compare_wants_equal_numbers(tmp_path: Path) -> None:
    """NaN compared as no difference at all: max(0, NaN) is 0."""
    nan = float("nan")
    assert compared(tmp_path, {"v0": measured(-2.0), "v2": measured()}, measured()) == 0
    assert compared(tmp_path, {"v0": measured(-2.0), "v2": measured(-1.001)}, measured()) == 1
    assert compared(tmp_path, {"v0": measured(-2.0), "v2": measured(nan)}, measured()) == 1
    assert compared(tmp_path, {"v0": measured(-2.0), "v2": measured()}, measured(nan)) == 1
    assert compared(tmp_path, {"v0": measured(-2.0), "v2": measured(tokens=6)}, measured()) == 1


def test_compare_refuses_files_of_something_else(tmp_path: Path) -> None:
    whole = {"v0": measured(), "v2": measured()}
    with pytest.raises(UserError, match=r"fresh.pt holds no tensor 'prompt' .*vllm_refit.py fresh .* again"):
        compared(tmp_path, whole, [1])
    with pytest.raises(UserError, match=r"refit.pt holds no tensor 'prompt' .*vllm_refit.py refit .* again"):
        compared(tmp_path, {"v0": measured()}, measured())
    with pytest.raises(UserError, match=r"refit.pt: prompt is \[9\]; fresh.pt has \[4\]"):
        compared(tmp_path, {"v0": measured(), "v2": {**measured(), "prompt": torch.zeros(9)}}, measured())
    for damage in (b"", b"text", (tmp_path / "fresh.pt").read_bytes()[:100]):
        torch.save(whole, tmp_path / "refit.pt")
        (tmp_path / "fresh.pt").write_bytes(damage)
        with pytest.raises(UserError, match=r"fresh.pt cannot be read \(\w+\); run"):
            importlib.import_module("vllm_refit").compare(tmp_path, [])
