"""From a recipe to a Ray cluster: its own on this machine, or one of several hosts; what it must offer and share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.vllm import engine_python
from nemo_rl_dsv4.utils.hosts import Host, HostNeed
from nemo_rl_dsv4.utils.shared_files import check_programs, check_shared, require_here

RAY_OBJECT_STORE_BYTES = 256 * 1024**2
RAY_START_SECONDS = 120
"""Ray's own limit is 30 seconds, too few on a machine that is busy."""
PASSED_ON = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "NVSHMEM_", "UCCL_", "VLLM_", "HF_HOME", "HF_HUB_")
"""Beginnings of variables that processes on all hosts get from this one: Ray starts them with those of `ray start`."""


@contextmanager
def ray_cluster(config: MasterConfig, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """A Ray of our own with a slot for every process of the recipe; or the cluster that `RAY_ADDRESS` names, or, for
    several nodes, the one that `ray start` left on this machine.

    Args:
        environment: further environment variables of every process.

    Raises:
        UserError: see `start_ray`.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address_to_join(config)
    variables = dict(environment or {})
    if address is not None:
        variables = {**passed_on(os.environ), **variables}
        options["address"] = address
    else:
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 starves workers on a busy desktop
        os.environ.setdefault("RAY_raylet_start_wait_time_s", str(RAY_START_SECONDS))
        need = hosts_needed(config)
        options |= {
            "address": "local",  # else Ray joins whatever `ray start` left on this machine
            "num_cpus": need.cpus,
            "num_gpus": need.gpus,
            "include_dashboard": False,
            "object_store_memory": RAY_OBJECT_STORE_BYTES,
        }
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    try:
        start_ray(options)
        yield
    finally:
        ray.shutdown()


def address_to_join(config: MasterConfig) -> str | None:
    """Address of the cluster to join; None where the recipe gets a Ray of its own on this machine."""
    return os.environ.get("RAY_ADDRESS") or ("auto" if config.cluster.num_nodes > 1 else None)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that processes on every host get from the process that starts the run."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


def start_ray(options: Mapping[str, Any]) -> None:
    """`ray.init`, whose many kinds of failure become one line.

    Raises:
        UserError: Ray did not start, or the cluster to join cannot be reached.
    """
    try:
        ray.init(**options)
    except Exception as error:  # a node that starts too slowly is a bare Exception
        address, named = options.get("address"), os.environ.get("RAY_ADDRESS")
        if named:
            what = f"the Ray cluster at RAY_ADDRESS={named} cannot be used"
            fix = "start it with `ray start --head`, or unset RAY_ADDRESS"
        elif address == "auto":
            what = "cluster.num_nodes is above 1 and no Ray cluster of this machine can be joined"
            fix = (
                "run `ray start --head` here and `ray start --address=HEAD:6379` on the other hosts (docs/cluster.md), "
                "or set RAY_ADDRESS"
            )
        else:
            what = "Ray did not start"
            fix = "free memory and processors, or allow more time with RAY_raylet_start_wait_time_s (seconds)"
        raise UserError(f"{what}: {str(error).strip() or type(error).__name__}; {fix}") from error


def hosts_needed(config: MasterConfig) -> HostNeed:
    """What a recipe wants of each node. CPU slots are for policy ranks and CPU engines; all nodes offer the same."""
    nodes, gpus = config.cluster.num_nodes, config.cluster.gpus_per_node
    if gpus:
        return HostNeed(nodes, gpus, gpus)
    engines = config.policy.generation.reference_cfg.num_workers
    return HostNeed(nodes, 0, config.world_size // nodes + -(-engines // nodes))


def policy_hosts(config: MasterConfig, hosts: Sequence[Host]) -> Sequence[Host]:
    """The nodes that train: all but those that the rollout has for itself."""
    return hosts[: len(hosts) - config.rollout_nodes]


def check_hosts(config: MasterConfig, hosts: Sequence[Host]) -> None:
    """Hosts share the folders that they have to, and have the engines' interpreter; nothing to ask on this host alone.

    Raises:
        UserError: key, folder or file, and the host without it.
    """
    if config.policy.dsv4.refit.transport == "folder" and config.policy.dsv4.refit.folder is None:
        require_here(
            hosts,
            "policy.dsv4.refit.transport is folder and policy.dsv4.refit.folder null, which is memory of this host",
            "set policy.dsv4.refit.folder to a folder that both share",
        )
    check_shared(shared_folders(config), hosts)
    check_programs(needed_programs(config), hosts)


def shared_folders(config: MasterConfig) -> dict[str, Path]:
    """Recipe key -> folder that every host must see, since processes there write it or read what is written here."""
    tiny, refit = config.policy.dsv4.tiny, config.policy.dsv4.refit
    folders: dict[str, str] = {}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
    if config.policy.model_name == TINY and tiny is not None:
        folders["policy.dsv4.tiny.cache_dir"] = tiny.cache_dir
    if refit.transport == "folder" and refit.folder is not None:
        folders["policy.dsv4.refit.folder"] = refit.folder
    return {key: Path(folder).expanduser().absolute() for key, folder in folders.items()}


def needed_programs(config: MasterConfig) -> dict[str, str]:
    """Recipe key -> file that every host must have at the same path.

    Raises:
        UserError: this host does not have it.
    """
    if config.policy.generation.backend != "vllm":
        return {}
    return {"policy.dsv4.vllm_python": engine_python(config.policy.dsv4.vllm_python)}
