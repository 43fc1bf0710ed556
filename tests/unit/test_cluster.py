"""From a recipe to what it needs of a Ray cluster; nothing is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_dsv4 import cluster
from nemo_rl_dsv4.cluster import address_to_join, hosts_needed, passed_on, policy_hosts, shared_folders
from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_places import EnginePlace
from nemo_rl_dsv4.rollout_engines import engine_places
from nemo_rl_dsv4.utils.hosts import Host, HostNeed, Place

RECIPES = Path(__file__).resolve().parents[2] / "examples/configs/recipes/llm"
FLASH = "grpo-deepseek-v4-flash-0731-16n8g-"


def recipe(name: str, *overrides: str):
    return load_config(RECIPES / f"{name}.yaml", ["runtime=embedded", *overrides])


def hosts(count: int) -> list[Host]:
    return [Host(f"n{number}", f"10.0.0.{number}") for number in range(count)]


def group_on(nodes: list[Host], per_node: int) -> SimpleNamespace:
    """A policy whose ranks are there, node after node."""
    return SimpleNamespace(places=[Place(node.node, (str(gpu),)) for node in nodes for gpu in range(per_node)])


@pytest.mark.parametrize(
    ("name", "overrides", "need"),
    [
        (f"{FLASH}automodel-cp8ep128", [], HostNeed(16, 8, 8)),
        (f"{FLASH}h200-automodel-cp8ep64-noncolocated-qat", [], HostNeed(16, 8, 8)),
        ("grpo-dsv4-mini-1n2g-automodel-qat", [], HostNeed(1, 2, 2)),
        (
            "grpo-dsv4-tiny-1n0g-automodel-qat",
            ["policy.dsv4.cpu_processes=4", "policy.generation.reference_cfg.num_workers=3", "cluster.num_nodes=2"],
            HostNeed(2, 0, 4),
        ),
    ],
)
def test_a_recipe_says_what_a_node_must_offer(name, overrides, need):
    assert hosts_needed(recipe(name, *overrides)) == need


def test_engines_of_sixteen_nodes_share_the_policys_gpus_node_by_node():
    config, nodes = recipe(f"{FLASH}automodel-cp8ep128"), hosts(16)
    assert list(policy_hosts(config, nodes)) == nodes
    shared = tuple(str(gpu) for gpu in range(8))
    assert engine_places(config, nodes, group_on(nodes, 8)) == [EnginePlace(node, 8, shared) for node in nodes]


def test_engines_with_nodes_of_their_own_take_the_last_ones():
    config, nodes = recipe(f"{FLASH}h200-automodel-cp8ep64-noncolocated-qat"), hosts(16)
    assert config.world_size == 64 and list(policy_hosts(config, nodes)) == nodes[:8]
    assert engine_places(config, nodes, group_on(nodes[:8], 8)) == [EnginePlace(node, 8) for node in nodes[8:]]


def test_engines_of_one_node_have_what_the_policy_leaves():
    own = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=2"]
    mini = "grpo-dsv4-mini-1n2g-automodel-qat"
    config = recipe(mini, "cluster.gpus_per_node=4", *own)
    assert engine_places(config, hosts(1), group_on(hosts(1), 2)) == [EnginePlace(hosts(1)[0], 2)]
    # Without a policy (the mismatch study) engines have all GPUs.
    assert engine_places(recipe(mini), hosts(1), None) == [EnginePlace(hosts(1)[0], 2)]


def test_which_cluster_is_joined(monkeypatch):
    """One node gets a Ray of its own, whatever `ray start` left on the machine; several need a cluster."""
    one = recipe("grpo-dsv4-tiny-1n0g-automodel-qat")
    two = recipe("grpo-dsv4-tiny-1n0g-automodel-qat", "cluster.num_nodes=2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (address_to_join(one), address_to_join(two)) == (None, "auto")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert address_to_join(one) == address_to_join(two) == "10.0.0.1:6379"


def test_no_cluster_to_join_is_one_line(monkeypatch):
    def fail(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(cluster.ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        UserError, match=r"num_nodes is above 1 and no Ray cluster .* Could not find .*; run `ray start"
    ):
        cluster.start_ray({"address": "auto"})


def test_what_other_hosts_get_of_the_environment():
    """The interface of NCCL named on the command line; not tokens, nor what belongs to this process."""
    own = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "HF_HOME": "/shared",
        "HF_TOKEN": "x",
        "HOME": "/",
    }
    assert passed_on(own) == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "HF_HOME": "/shared"}


def test_folders_that_hosts_share(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = recipe("grpo-dsv4-tiny-1n0g-automodel-qat", "policy.dsv4.tiny.cache_dir=cache")
    found = shared_folders(tiny)
    assert set(found) == {"checkpointing.checkpoint_dir", "policy.dsv4.tiny.cache_dir"}
    assert found["policy.dsv4.tiny.cache_dir"] == tmp_path / "cache"
    folder = ["policy.dsv4.refit.transport=folder", "policy.dsv4.refit.folder=/shared", "checkpointing.enabled=false"]
    assert shared_folders(recipe(f"{FLASH}automodel-cp8ep128", *folder)) == {
        "policy.dsv4.refit.folder": Path("/shared")
    }
