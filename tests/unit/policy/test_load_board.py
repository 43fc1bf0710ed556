"""The driver hears how far a rank is while the rank is busy loading."""

from __future__ import annotations

import sys
import time

import pytest
import ray
from ray import cloudpickle

from nemo_rl_dsv4.policy.load_board import reporter, watched


@ray.remote
class Loader:
    def load(self, board, total: int) -> str:
        report = reporter(board)
        for done in range(1, total + 1):
            report(done, total)
            time.sleep(0.05)
        time.sleep(1.0)
        return "loaded"


@pytest.fixture(scope="module")
def cluster():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_the_driver_hears_of_a_rank_that_answers_no_calls(cluster):
    heard: list[tuple[int, int]] = []
    actor = Loader.remote()
    with watched(lambda done, total: heard.append((done, total))) as (board, watch):
        ref = actor.load.remote(board, 60)
        watch([ref])
        assert ray.get(ref) == "loaded"
    assert heard == sorted(heard) and heard[0][0] < 60 and heard[-1] == (60, 60)
    assert len({done for done, _ in heard}) >= 3
