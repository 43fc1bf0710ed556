"""Training ranks with shards serve the workers of an engine, as `vllm_refit.py` measures it; ranks are threads here."""

from __future__ import annotations

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
