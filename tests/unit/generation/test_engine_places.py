"""Hosts and GPUs of vLLM engines; hosts are made up."""

from __future__ import annotations

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_places import EnginePlace, own_places, shared_places
from nemo_rl_dsv4.utils.hosts import Host, Place

ONE, TWO = Host("n1", "10.0.0.1"), Host("n2", "10.0.0.2", strategy="bundle 1")


def test_engines_share_the_gpus_of_neighbouring_ranks_of_one_host():
    """With CUDA_VISIBLE_DEVICES=3,GPU-ab the policy trains there; an engine told "0" would take somebody else's GPU."""
    ranks = [Place("n1", ("3",)), Place("n1", ("GPU-ab",)), Place("n2", ("0",)), Place("n2", ("1",))]
    assert shared_places([ONE, TWO], ranks, 2) == [
        EnginePlace(ONE, 2, ("3", "GPU-ab")),
        EnginePlace(TWO, 2, ("0", "1")),
    ]
    assert [place.shared for place in shared_places([ONE, TWO], ranks, 1)] == [("3",), ("GPU-ab",), ("0",), ("1",)]
    with pytest.raises(
        UserError, match="tensor_parallel_size is 4, which does not divide the 2 policy ranks of host 10.0"
    ):
        shared_places([ONE, TWO], ranks, 4)


def test_engines_with_gpus_of_their_own_fill_them():
    assert own_places([ONE, TWO], 4, 2) == [EnginePlace(ONE, 2)] * 2 + [EnginePlace(TWO, 2)] * 2
    with pytest.raises(UserError, match="tensor_parallel_size is 8, which does not divide 4 GPUs of a host"):
        own_places([ONE], 4, 8)


def test_an_engine_sees_its_gpus_and_no_others():
    """Shared ones are named, and Ray is told to leave the name alone; own ones come from Ray, which counts them."""
    shared = EnginePlace(TWO, 2, ("4", "5"), "HIP_VISIBLE_DEVICES").actor_options("/venv/python", {"A": "1"})
    assert shared["runtime_env"] == {
        "py_executable": "/venv/python",
        "env_vars": {"A": "1", "HIP_VISIBLE_DEVICES": "4,5", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"},
    }
    assert (shared["num_gpus"], shared["scheduling_strategy"]) == (0, "bundle 1")
    own = EnginePlace(ONE, 2).actor_options("/venv/python", {"A": "1"})
    assert own["runtime_env"]["env_vars"] == {"A": "1"} and own["num_gpus"] == 2 and "scheduling_strategy" not in own
