"""From a recipe to rollout engines: which kind, on which GPUs, with which settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.vllm_spec import vllm_spec
from nemo_rl_dsv4.data import Tokenizer
from nemo_rl_dsv4.generation.group import ReferenceGeneration
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm import VllmGeneration, engine_python, gpus_of_engines
from nemo_rl_dsv4.generation.vllm_settings import engine_arguments, engine_environment
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.refit.buckets import bucket_bytes


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
    config: MasterConfig, tokenizer: Tokenizer, on_progress: Callable[[int], None]
) -> ReferenceGeneration | VllmGeneration:
    """Start the engines' processes; `build` later gives them a model.

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
        )
    engine, profile = generation.vllm_cfg, get_profile(config.policy.dsv4.rollout_profile)
    engine_arguments(vllm_spec(config, Path(config.policy.model_name)), profile)  # refused before a process starts
    # Engines with GPUs of their own take those behind the policy's.
    own = config.rollout_gpus
    first, count = (config.world_size, own) if own else (0, config.world_size)
    return VllmGeneration(
        params,
        pad_id=tokenizer.pad_id,
        gpus=gpus_of_engines(count, engine.tensor_parallel_size, first=first),
        python=engine_python(config.policy.dsv4.vllm_python),
        environment=engine_environment(profile, engine.env_vars),
        on_progress=on_progress,
        bucket_bytes=bucket_bytes(engine.refit_buffer_size_gb or 1.0),
        transport=config.policy.dsv4.refit.transport,
        sleeps=config.policy.dsv4.engine_sleep,
    )
