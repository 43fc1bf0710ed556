"""What every group of Ray actors shares: the environment of CPU workers, and errors that arrive as themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from nemo_rl_dsv4.errors import UserError

CPU_WORKER_OPTIONS: dict[str, Any] = {
    "num_cpus": 1,
    "runtime_env": {
        "env_vars": {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    },
}
"""Actor options of CPU workers: contended OpenMP threads are ten times slower than one thread a process."""

GPU_WORKER_OPTIONS: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 1,
    "runtime_env": {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
}
"""Actor options of a worker that owns one GPU."""


def get(refs: Sequence[Any]) -> list[Any]:
    """`ray.get` that raises a worker's `UserError` as itself, and the first error without waiting for other calls."""
    try:
        return ray.get(list(refs))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        raise


def merged(
    own: Mapping[str, Any], host: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Actor options: those of a kind of worker, those of the host it goes to, and environment variables on top."""
    runtime_env = dict(own.get("runtime_env", {}))
    runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **(environment or {})}
    return {**own, **host, "runtime_env": runtime_env}


def kill(actors: Iterable[Any]) -> None:
    """End the processes of actors at once."""
    for actor in actors:
        ray.kill(actor)
