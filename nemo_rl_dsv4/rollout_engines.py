"""From a recipe to rollout engines: which kind, on which hosts and GPUs, with which settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.vllm_spec import vllm_spec
from nemo_rl_dsv4.data import Tokenizer
from nemo_rl_dsv4.generation.engine_places import EnginePlace, own_places, shared_places
from nemo_rl_dsv4.generation.group import ReferenceGeneration
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm import VllmGeneration, engine_python
from nemo_rl_dsv4.generation.vllm_settings import engine_arguments, engine_environment
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.refit.buckets import bucket_bytes
from nemo_rl_dsv4.utils.hosts import Host


def sampling_params(config: MasterConfig, tokenizer: Tokenizer) -> SamplingParams:
    """How training rollouts are sampled; the end-of-sentence token always stops."""
    generation = config.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=tuple(sorted({tokenizer.eos_id, *(generation.stop_token_ids or [])})),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def start_engines(
    config: MasterConfig,
    tokenizer: Tokenizer,
    on_progress: Callable[[int], None],
    hosts: Sequence[Host],
    group: PolicyGroup | None = None,
) -> ReferenceGeneration | VllmGeneration:
    """Start the engines' processes; `build` later gives them a model.

    Args:
        on_progress: called with the number of responses each time some are finished.
        hosts: all nodes of the run, those of the policy first.
        group: the policy, whose GPUs engines share unless the recipe gives them others; None where nothing is trained.

    Raises:
        UserError: no vLLM environment, or settings that contradict the rollout profile.
    """
    params, generation = sampling_params(config, tokenizer), config.policy.generation
    if generation.backend == "reference":
        return ReferenceGeneration(
            params,
            pad_id=tokenizer.pad_id,
            num_workers=generation.reference_cfg.num_workers,
            on_progress=on_progress,
            hosts=hosts,
        )
    folder = config.policy.dsv4.refit.folder
    engine, profile = generation.vllm_cfg, get_profile(config.policy.dsv4.rollout_profile)
    engine_arguments(vllm_spec(config, Path(config.policy.model_name)), profile)  # refused before a process starts
    return VllmGeneration(
        params,
        pad_id=tokenizer.pad_id,
        places=engine_places(config, hosts, group),
        python=engine_python(config.policy.dsv4.vllm_python),
        environment=engine_environment(profile, engine.env_vars),
        on_progress=on_progress,
        bucket_bytes=bucket_bytes(engine.refit_buffer_size_gb or 1.0),
        transport=config.policy.dsv4.refit.transport,
        sleeps=config.policy.dsv4.engine_sleep,
        folder=None if folder is None else Path(folder).expanduser().absolute(),
    )


def engine_places(config: MasterConfig, hosts: Sequence[Host], group: PolicyGroup | None) -> list[EnginePlace]:
    """Host and GPUs of each vLLM engine of a recipe; see `start_engines`."""
    workers, per_node = config.policy.generation.vllm_cfg.tensor_parallel_size, config.cluster.gpus_per_node
    if config.rollout_nodes:
        return own_places(hosts[len(hosts) - config.rollout_nodes :], per_node, workers)
    if config.rollout_gpus or group is None:
        return own_places(hosts, config.rollout_gpus or per_node, workers)
    return shared_places(hosts, group.places, workers)
