"""Whether a valid recipe can also run: with this version, and on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.runtime_choice import Runtime
from nemo_rl_dsv4.generation.python_of_engines import python_problem
from nemo_rl_dsv4.generation.vllm_settings import MAKE_VLLM, VLLM_PYTHON

GPU_FILES = ("/dev/nvidia0", "/dev/kfd")
"""Devices of a machine with an NVIDIA or AMD GPU; asking torch would take seconds."""

RAY_CLUSTER_FILE = "/tmp/ray/ray_current_cluster"
"""Where `ray start` leaves the address of this machine's cluster, for `ray.init(address="auto")`."""


def not_implemented(config: MasterConfig, runtime: Runtime) -> list[str]:
    """What a recipe asks for that this version refuses to run, one sentence each."""
    refused = []
    if runtime == "nemo_rl":
        refused += _beyond_grpo_train(config)
    generation = config.policy.generation
    if generation.backend == "vllm" and generation.vllm_cfg.async_engine:
        refused.append("policy.generation.vllm_cfg.async_engine is true; whole batches are rolled out: set false")
    return refused


def _beyond_grpo_train(config: MasterConfig) -> list[str]:
    """What the synchronous `grpo_train` of NeMo-RL, or our parts under it, do not do."""
    refused, grpo = [], config.grpo
    if grpo.async_grpo.enabled:
        refused.append("grpo.async_grpo.enabled is true; only NeMo-RL's synchronous grpo_train is run: set false")
    samples, size = grpo.max_val_samples, grpo.val_batch_size
    if samples is not None and size is not None and samples > size and samples % size:
        refused.append(
            f"grpo.max_val_samples {samples} is no multiple of grpo.val_batch_size {size}; NeMo-RL would leave the "
            "rest out: make it one"
        )
    if not config.checkpointing.save_optimizer and config.checkpointing.enabled:
        refused.append("checkpointing.save_optimizer is false; the policy always writes its optimizer: set true")
    return refused


def missing_here(config: MasterConfig) -> list[str]:
    """What a recipe needs that this machine does not have, one sentence each."""
    missing = []
    gpus = config.cluster.gpus_per_node
    if gpus and not any(Path(file).exists() for file in GPU_FILES):
        missing.append(f"the recipe needs {config.cluster.num_nodes} x {gpus} GPUs; this machine shows none")
    nodes = config.cluster.num_nodes
    if nodes > 1 and not os.environ.get("RAY_ADDRESS") and not Path(RAY_CLUSTER_FILE).exists():
        missing.append(
            f"the recipe needs a Ray cluster of {nodes} nodes; none was started here, and RAY_ADDRESS is not set"
        )
    own = config.policy.dsv4.vllm_python
    if config.policy.generation.backend != "vllm":
        return missing
    if own is not None or Path(VLLM_PYTHON).is_file():
        path = VLLM_PYTHON if own is None else own
        problem = python_problem(path)
        if problem is not None:
            where = "the engines' Python" if own is None else "policy.dsv4.vllm_python"
            missing.append(f"{where} is {path!r}, {problem}")
    elif importlib.util.find_spec("vllm") is None:
        missing.append(f"policy.generation.backend is vllm, which has no environment here; make it with `{MAKE_VLLM}`")
    return missing
