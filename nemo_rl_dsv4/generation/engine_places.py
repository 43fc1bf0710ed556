"""On which host, and on which of its GPUs, each vLLM engine runs.

The workers of an engine share one host. An engine either shares the GPUs of policy ranks, which Ray has given to those,
or has GPUs of its own, which Ray gives to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.hosts import LEAVE, Host, Place


@dataclass(frozen=True)
class EnginePlace:
    """One engine's GPUs.

    Attributes:
        host: where they are.
        workers: tensor-parallel workers, a GPU each.
        shared: names of the GPUs, as policy ranks have them, in the workers' order; empty where Ray gives it its own.
        variable: the environment variable that shows a process its GPUs.
    """

    host: Host
    workers: int
    shared: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"

    def actor_options(self, python: str, environment: Mapping[str, str]) -> dict[str, Any]:
        """Options of the engine's Ray actor.

        Args:
            python: interpreter with vLLM.
            environment: environment variables of the engine.
        """
        shown = {self.variable: ",".join(self.shared), f"{LEAVE}{self.variable}": "1"} if self.shared else {}
        return {
            "num_cpus": 0,
            "num_gpus": 0 if self.shared else self.workers,
            "runtime_env": {"py_executable": python, "env_vars": {**environment, **shown}},
            **self.host.options(),
        }


def shared_places(hosts: Sequence[Host], ranks: Sequence[Place], tensor_parallel: int) -> list[EnginePlace]:
    """Engines on the policy's GPUs: one for every `tensor_parallel` consecutive ranks of a host.

    Args:
        hosts: of the policy.
        ranks: place of each policy rank, in rank order.
        tensor_parallel: workers of an engine.

    Raises:
        UserError: the ranks of a host do not divide into engines.
    """
    engines = []
    for host in hosts:
        own = [place for place in ranks if place.node == host.node]
        _require_whole(len(own), tensor_parallel, f"the {len(own)} policy ranks of host {host.address}")
        for start in range(0, len(own), tensor_parallel):
            part = own[start : start + tensor_parallel]
            gpus = tuple(gpu for place in part for gpu in place.gpus)
            engines.append(EnginePlace(host, tensor_parallel, gpus, part[0].variable))
    return engines


def own_places(hosts: Sequence[Host], gpus_per_host: int, tensor_parallel: int) -> list[EnginePlace]:
    """Engines that fill `gpus_per_host` GPUs of each host by themselves.

    Raises:
        UserError: those do not divide into engines.
    """
    _require_whole(gpus_per_host, tensor_parallel, f"{gpus_per_host} GPUs of a host")
    return [EnginePlace(host, tensor_parallel) for host in hosts for _ in range(gpus_per_host // tensor_parallel)]


def _require_whole(gpus: int, tensor_parallel: int, what: str) -> None:
    if gpus % tensor_parallel or not gpus:
        raise UserError(
            f"policy.generation.vllm_cfg.tensor_parallel_size is {tensor_parallel}, which does not divide {what}: the "
            "workers of one engine share a host; choose a divisor"
        )
