"""Nodes of a Ray cluster that a run has to itself, and which of its processes goes where.

A run reserves one bundle of a placement group a node (`STRICT_SPREAD`: no two on one node), so that either all of them
are free or the run says that they are not. Everything goes by Ray's node ids: two nodes may share an address.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

SECONDS_TO_WAIT_FOR_NODES = 60.0
"""A run that ended a moment ago gives its nodes back within seconds."""


LEAVE = "RAY_EXPERIMENTAL_NOSET_"
"""Before the name of a variable: Ray then leaves that variable of a process as it is."""
LEAVE_GPUS = (f"{LEAVE}CUDA_VISIBLE_DEVICES", f"{LEAVE}HIP_VISIBLE_DEVICES")


class HostNeed(NamedTuple):
    """What a recipe wants of a cluster: `hosts` nodes, each with `gpus` GPUs and `cpus` slots for CPU processes."""

    hosts: int
    gpus: int
    cpus: int

    def resources(self) -> dict[str, float]:
        """Of one node, under Ray's names."""
        return {name: float(count) for name, count in (("GPU", self.gpus), ("CPU", self.cpus)) if count}


@dataclass(frozen=True)
class Host:
    """A reserved node.

    Attributes:
        node: Ray's id of it.
        address: its IP address as Ray knows it.
        strategy: puts an actor or task into the reserved bundle.
    """

    node: str
    address: str
    strategy: Any = None

    def options(self) -> dict[str, Any]:
        """Options of an actor or task that has to run there."""
        return {} if self.strategy is None else {"scheduling_strategy": self.strategy}


class Place(NamedTuple):
    """Where a process found itself.

    Attributes:
        node: Ray's id of its node.
        gpus: names that Ray gave its GPUs, as CUDA_VISIBLE_DEVICES (or `variable`) says them; empty on CPUs.
        variable: the environment variable that shows a process its GPUs.
    """

    node: str
    gpus: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Reservation:
    """The nodes of a run, ordered by address, so that neighbours in a rack have neighbouring ranks."""

    hosts: tuple[Host, ...]
    group: PlacementGroup

    def release(self) -> None:
        """Give the nodes back; processes on them end."""
        remove_placement_group(self.group)


def reserve(need: HostNeed, *, timeout: float = SECONDS_TO_WAIT_FOR_NODES) -> Reservation:
    """Reserve nodes of the cluster that this process has joined.

    Args:
        need: how many, and what each must have.
        timeout: seconds to wait for nodes that others use now.

    Raises:
        UserError: the cluster has too few such nodes, or they are not free.
    """
    check_cluster(ray.nodes(), need)
    group = placement_group([need.resources() for _ in range(need.hosts)], strategy="STRICT_SPREAD")
    if not group.wait(timeout):
        remove_placement_group(group)
        raise UserError(
            f"{_wanted(need)}, and the Ray cluster has such nodes but did not get them free within {timeout:g} s "
            f"(free in all: {_shown(ray.available_resources())}); end what runs on it (`ray status` shows it), or "
            "lower cluster.num_nodes"
        )
    table: Any = placement_group_table(group)
    addresses = node_addresses()
    hosts = [
        Host(node, addresses[node], PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle))
        for bundle, node in table["bundles_to_node_id"].items()
    ]
    chosen = tuple(sorted(hosts, key=lambda host: _address_order(host.address, host.node)))
    log.info("reserved nodes: %s", ", ".join(host.address for host in chosen))
    return Reservation(chosen, group)


def check_cluster(nodes: Sequence[Mapping[str, Any]], need: HostNeed) -> None:
    """Refuse a cluster that could never serve a recipe, whoever uses it now.

    Args:
        nodes: what `ray.nodes()` returns.

    Raises:
        UserError: names the keys, what was found and what to do.
    """
    alive = [node for node in nodes if node["Alive"]]
    fit = [node for node in alive if _fits(node["Resources"], need)]
    if len(fit) >= need.hosts:
        return
    found = "; ".join(f"{node['NodeManagerAddress']}: {_shown(node['Resources'])}" for node in alive) or "none"
    raise UserError(
        f"{_wanted(need)}, but {len(fit)} of the {len(alive)} nodes of the Ray cluster have that ({found}); start Ray "
        "on more nodes (docs/cluster.md), or lower cluster.num_nodes or cluster.gpus_per_node"
    )


def node_addresses() -> dict[str, str]:
    """Ray's node id -> IP address, of all nodes that are alive."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def rank_order(places: Sequence[Place], nodes: Sequence[str]) -> list[int]:
    """Which process becomes rank 0, 1, ...: node after node, on each by GPU number.

    Neighbouring ranks share a node, and a rank's place within it is its GPU's: groups of context and expert parallelism
    rely on the first, dispatchers that send from the GPU of one node to the same GPU of another on the second.

    Args:
        places: of every process.
        nodes: Ray's ids in the order that nodes get ranks.

    Returns:
        Indices into `places`.
    """
    return sorted(
        range(len(places)),
        key=lambda i: (nodes.index(places[i].node), [_number(gpu) for gpu in places[i].gpus], i),
    )


def host_views(places: Sequence[Place]) -> list[tuple[int, list[str], str]]:
    """For each rank its number on its host, the GPUs of all ranks there in rank order, and the variable for them.

    Args:
        places: of the ranks, in rank order, a GPU each.
    """
    views = []
    for rank, place in enumerate(places):
        local = sum(earlier.node == place.node for earlier in places[:rank])
        gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
        views.append((local, gpus, place.variable))
    return views


def _number(name: str) -> tuple[int, int, str]:
    """GPU names in their order: numbers by value, UUIDs behind them by text."""
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)


def _address_order(address: str, node: str) -> tuple[int, int, str, str]:
    try:
        parsed = ipaddress.ip_address(address)
        return parsed.version, int(parsed), "", node
    except ValueError:  # Ray was started with a host name
        return 99, 0, address, node


def _fits(resources: Mapping[str, float], need: HostNeed) -> bool:
    return all(resources.get(name, 0) >= count for name, count in need.resources().items())


def _wanted(need: HostNeed) -> str:
    if need.gpus:
        return (
            f"the recipe needs cluster.num_nodes = {need.hosts} nodes, each with cluster.gpus_per_node = {need.gpus} "
            f"GPUs and {need.cpus} CPUs"
        )
    return f"the recipe needs cluster.num_nodes = {need.hosts} nodes, each with {need.cpus} CPUs"


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("GPU", "CPU"))
