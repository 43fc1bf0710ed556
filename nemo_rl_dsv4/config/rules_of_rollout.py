"""Rules between the rollout engine's settings, the rollout profile and the GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil, prod
from pathlib import Path

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.model_limits import ModelLimits, model_limits
from nemo_rl_dsv4.config.rules import require, require_divides
from nemo_rl_dsv4.config.rules_of_values import check_stop_tokens
from nemo_rl_dsv4.config.runtime_choice import Runtime
from nemo_rl_dsv4.config.vllm_spec import vllm_spec
from nemo_rl_dsv4.generation.rollout_facts import ANY_GPU, BF16_WEIGHTS, FACTS, PROFILE_OF_GPU, RolloutFacts
from nemo_rl_dsv4.generation.vllm_refusals import check_own_variables, check_variables
from nemo_rl_dsv4.generation.vllm_settings import (
    check_hidden_size,
    check_kernel_shapes,
    engine_arguments,
    engine_environment,
)

BACKEND_CLASS = "nemo_automodel.components.models.common.utils.BackendConfig"
"""The one class that `automodel_kwargs.backend._target_` may name."""
MEMORY_FOLDERS = ("/dev/shm", "/run/shm")
"""Folders that every host has for itself."""
NOT_PASSED_ON = {"pipeline_parallel_size": 1, "num_first_layers_in_bf16": 0, "num_last_layers_in_bf16": 0}
"""Keys of `vllm_cfg` that the embedded runtime's engines do not take -> the value that asks for nothing."""


def check_target(config: MasterConfig) -> None:
    """The backend's class path is AutoModel's."""
    target = config.policy.dtensor_cfg.automodel_kwargs.backend.target
    require(
        target in (None, BACKEND_CLASS),
        f"policy.dtensor_cfg.automodel_kwargs.backend._target_ is {target!r}; wanted {BACKEND_CLASS}, or null",
    )


def check_rollout_engine(config: MasterConfig, runtime: Runtime) -> None:
    """Settings of a vLLM engine fit the profile that the trainer rounds by, and nothing is dropped silently."""
    generation, dsv4, limits = config.policy.generation, config.policy.dsv4, model_limits(config)
    if limits.vocab_size is not None:
        check_stop_tokens(config, limits.vocab_size, "policy.model_name")
    require(
        not dsv4.engine_sleep or (generation.backend == "vllm" and generation.colocated.enabled),
        f"policy.dsv4.engine_sleep is true, but only vLLM engines that share the policy's GPUs sleep, and "
        f"policy.generation.backend is {generation.backend} with colocated.enabled {generation.colocated.enabled}; set "
        "engine_sleep to false",
    )
    require(
        not dsv4.trainer_sleep or dsv4.engine_sleep,
        "policy.dsv4.trainer_sleep is true, but policy.dsv4.engine_sleep is false: an engine that stays awake takes no "
        "more memory when it generates, so the policy need not make room; set engine_sleep to true, or trainer_sleep "
        "to false",
    )
    require(
        not (dsv4.trainer_sleep and config.policy.dtensor_cfg.cpu_offload),
        "policy.dsv4.trainer_sleep is true and policy.dtensor_cfg.cpu_offload too, which keeps weights and optimizer "
        "states in host memory anyway; set trainer_sleep to false",
    )
    require(
        not (dsv4.refit.direct and dsv4.engine_sleep),
        "policy.dsv4.refit.direct is true and policy.dsv4.engine_sleep too, but an engine that falls asleep loses what "
        "was never sent (padding); set one of them to false",
    )
    require(
        dsv4.refit.folder is None or dsv4.refit.transport == "folder",
        f"policy.dsv4.refit.folder is {dsv4.refit.folder!r}, but policy.dsv4.refit.transport is "
        f"{dsv4.refit.transport}, which writes no files; set folder to null, or transport to folder",
    )
    if generation.backend != "vllm":
        require(
            dsv4.refit.transport == "auto",
            f"policy.dsv4.refit.transport is {dsv4.refit.transport}, but policy.generation.backend is "
            f"{generation.backend}, whose engines get weights through Ray; set it to auto",
        )
        return
    require(
        dsv4.refit.transport != "broadcast" or config.world_size > 1 or not generation.colocated.enabled,
        "policy.dsv4.refit.transport is broadcast, but the one policy rank shares its GPU with the engine, and NCCL "
        "has no two ends on one GPU; set it to auto",
    )
    require(
        dsv4.refit.transport != "cuda_ipc" or generation.colocated.enabled,
        "policy.dsv4.refit.transport is cuda_ipc, but policy.generation.colocated.enabled is false: no training rank "
        "is on an engine's GPU; set it to auto, shared_memory or broadcast",
    )
    require(
        dsv4.refit.transport != "shared_memory" or not config.rollout_nodes,
        f"policy.dsv4.refit.transport is shared_memory, but generation has {config.rollout_nodes} nodes of its own, on "
        "which no training rank could fill it; set it to auto or broadcast",
    )
    require(
        dsv4.refit.transport != "folder" or dsv4.refit.folder is not None or config.cluster.num_nodes == 1,
        f"policy.dsv4.refit.transport is folder with cluster.num_nodes = {config.cluster.num_nodes}, but "
        "policy.dsv4.refit.folder is null, which is memory of one host; name a folder that all nodes share",
    )
    require(
        dsv4.refit.folder is None or config.cluster.num_nodes == 1 or not _in_memory(dsv4.refit.folder),
        f"policy.dsv4.refit.folder is {dsv4.refit.folder!r} with cluster.num_nodes = {config.cluster.num_nodes}, which "
        "is memory of each host by itself; name a folder that all nodes share",
    )
    plain = generation.temperature == 1.0 and generation.top_p == 1.0 and generation.top_k is None
    require(
        plain or generation.vllm_cfg.logprobs_mode == "raw_logprobs",
        f"policy.generation.vllm_cfg.logprobs_mode is {generation.vllm_cfg.logprobs_mode}, but the trainer's "
        f"log-probabilities are those of raw logits, and policy.generation has temperature {generation.temperature}, "
        f"top_p {generation.top_p}, top_k {generation.top_k}; set logprobs_mode to raw_logprobs",
    )
    implied = PROFILE_OF_GPU.get(dsv4.gpu or "")
    require(
        implied is None or dsv4.rollout_profile in ("auto", "bf16", implied, implied + BF16_WEIGHTS),
        f"policy.dsv4.rollout_profile is {dsv4.rollout_profile} but policy.dsv4.gpu is {dsv4.gpu}, whose rollout is "
        f"{implied}; change one of them, or set rollout_profile to auto",
    )
    if runtime == "embedded":
        for key, default in NOT_PASSED_ON.items():
            found = getattr(generation.vllm_cfg, key)
            require(
                found == default,
                f"policy.generation.vllm_cfg.{key} is {found}, which the embedded runtime does not do; set it to "
                f"{default}",
            )
    facts = _facts(config)
    engine_arguments(vllm_spec(config, Path(config.policy.model_name)), facts)
    if facts is ANY_GPU:
        check_own_variables(generation.vllm_cfg.env_vars)
        check_variables(generation.vllm_cfg.env_vars, facts)
    else:
        engine_environment(facts, generation.vllm_cfg.env_vars)
    _check_buffer(config, limits)
    workers = generation.vllm_cfg.tensor_parallel_size
    for name in ("num_attention_heads", "o_groups"):
        size = getattr(limits, name)
        if size is not None:
            key = "policy.generation.vllm_cfg.tensor_parallel_size"
            require_divides(workers, key, size, f"the model's {name}", "choose a divisor of it")
    if not (dsv4.gpu or "").startswith("mi") and "rocm" not in dsv4.rollout_profile:
        if limits.hidden_size is not None:
            check_hidden_size(limits.hidden_size, "hidden_size of policy.model_name")
        if generation.vllm_cfg.precision == "fp8":
            check_kernel_shapes(asdict(limits), "policy.model_name")


def _in_memory(folder: str) -> bool:
    """Whether a folder lies in a host's memory."""
    path = Path(folder).expanduser().absolute().resolve()
    return any(path.is_relative_to(memory) for memory in MEMORY_FOLDERS)


def _check_buffer(config: MasterConfig, limits: ModelLimits) -> None:
    """A buffer of the refit holds the largest weight; the sizes that are known here give a lower bound of it."""
    size = config.policy.generation.vllm_cfg.refit_buffer_size_gb
    sizes = {
        "embed.weight": (2, limits.vocab_size, limits.hidden_size),  # BF16
        "attn.wq_b.weight": (1, limits.q_lora_rank, limits.num_attention_heads, limits.head_dim),  # FP8
    }
    for name, factors in sizes.items():
        known = [factor for factor in factors if factor is not None]
        if size is None or len(known) < len(factors):
            continue
        needed = prod(known)
        require(
            size * 2**30 >= needed,
            f"policy.generation.vllm_cfg.refit_buffer_size_gb is {size}, and {name} of policy.model_name alone takes "
            f"{needed} bytes; wanted at least {ceil(needed / 2**30 * 1000) / 1000}",
        )


def _facts(config: MasterConfig) -> RolloutFacts:
    """Of the profile named, of the one that the recipe's GPU implies, or what is common to all GPUs."""
    dsv4 = config.policy.dsv4
    if dsv4.rollout_profile != "auto":
        return FACTS[dsv4.rollout_profile]
    implied = PROFILE_OF_GPU.get(dsv4.gpu or "")
    if implied is None:
        return ANY_GPU
    return replace(FACTS[implied], name=f"auto ({implied}: policy.dsv4.gpu is {dsv4.gpu})")
