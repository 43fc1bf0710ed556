"""Which process becomes which rank, and clusters that cannot serve a recipe; nodes are made up."""

from __future__ import annotations

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils import hosts
from nemo_rl_dsv4.utils.hosts import Host, HostNeed, Place, check_cluster, host_views, rank_order


def node(address: str, gpus: int, cpus: int = 64, *, alive: bool = True) -> dict:
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": {"GPU": gpus, "CPU": cpus}}


def test_ranks_go_node_after_node_and_by_gpu_number():
    """Ray starts processes in any order and gives their GPUs in any order; ten comes behind nine, not behind one."""
    places = [Place("n2", ("1",)), Place("n1", ("10",)), Place("n1", ("9",)), Place("n2", ("0",))]
    assert rank_order(places, ["n1", "n2"]) == [2, 1, 3, 0]
    assert rank_order(places, ["n2", "n1"]) == [3, 0, 2, 1]
    assert rank_order([Place("n", ("GPU-b",)), Place("n", ("GPU-a",))], ["n"]) == [1, 0]
    assert rank_order([Place("n"), Place("n"), Place("n")], ["n"]) == [0, 1, 2]


def test_a_rank_that_sees_its_host_finds_its_gpu_under_its_number_there():
    """UCCL-EP takes LOCAL_RANK, or the current device, for both: with one GPU in sight all ranks were number 0."""
    places = [
        Place("n1", ("3",), "HIP_VISIBLE_DEVICES"),
        Place("n1", ("5",), "HIP_VISIBLE_DEVICES"),
        Place("n2", ("0",)),
    ]
    assert host_views(places) == [
        (0, ["3", "5"], "HIP_VISIBLE_DEVICES"),
        (1, ["3", "5"], "HIP_VISIBLE_DEVICES"),
        (0, ["0"], "CUDA_VISIBLE_DEVICES"),
    ]


def test_nodes_are_ordered_by_address():
    order = sorted(["10.0.0.10", "10.0.0.9", "login", "10.0.1.1"], key=lambda text: hosts._address_order(text, "id"))
    assert order == ["10.0.0.9", "10.0.0.10", "10.0.1.1", "login"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node("10.0.0.1", 8), node("10.0.0.2", 4)],
            r"cluster.num_nodes = 2 nodes, each with cluster.gpus_per_node = 8 GPUs and 8 CPUs, but 1 of the 2 nodes "
            r"of the Ray cluster have that \(10.0.0.1: 8 GPUs, 64 CPUs; 10.0.0.2: 4 GPUs, 64 CPUs\); start Ray on more",
        ),
        ([node("a", 8), node("b", 8, alive=False)], "but 1 of the 1 nodes"),
        ([node("a", 8), node("b", 8, cpus=4)], "b: 8 GPUs, 4 CPUs"),
        ([], r"but 0 of the 0 nodes .* \(none\)"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(nodes, message):
    with pytest.raises(UserError, match=message):
        check_cluster(nodes, HostNeed(2, 8, 8))


def test_a_cluster_that_is_large_enough_is_not_refused():
    check_cluster([node("a", 8), node("b", 16), node("c", 0)], HostNeed(2, 8, 8))
    check_cluster([node("a", 0, cpus=2)], HostNeed(1, 0, 2))


def test_what_a_node_must_offer_is_said_in_rays_words():
    assert HostNeed(2, 8, 8).resources() == {"GPU": 8.0, "CPU": 8.0}
    assert HostNeed(2, 0, 3).resources() == {"CPU": 3.0}
    assert Host("n", "10.0.0.1").options() == {}
