"""One Ray for the tests of a module that need several processes; other tests start their own."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    ray.init(
        address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()
