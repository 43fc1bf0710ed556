"""What tests of several processes share: one Ray a module, where they do not start their own, and a checkpoint."""

from __future__ import annotations

import os

import pytest

from nemo_rl_dsv4.model.release_writer import write_release_checkpoint


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process for every CPU that nobody needs
    import ray

    ray.init(
        address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, config_once, training_once):
    """A released checkpoint of the tiny model with random weights."""
    folder = tmp_path_factory.mktemp("release") / "model"
    write_release_checkpoint(training_once, config_once, folder, expert_format="fp8")
    return folder
