"""From a recipe to rollout engines: which kind, on which GPUs, with which settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.data import Tokenizer
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.group import ReferenceGeneration
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm import VllmGeneration, engine_python, gpus_of_engines
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec, check_agreement, engine_environment
from nemo_rl_dsv4.numerics import get_profile

BYTES_PER_GIB = 1 << 30


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
    check_agreement(vllm_spec(config, Path(config.policy.model_name)), profile)
    return VllmGeneration(
        params,
        pad_id=tokenizer.pad_id,
        gpus=gpus_of_engines(config.world_size, engine.tensor_parallel_size),
        python=engine_python(config.policy.dsv4.vllm_python),
        environment=engine_environment(profile, engine.env_vars),
        on_progress=on_progress,
        bucket_bytes=int((engine.refit_buffer_size_gb or 1.0) * BYTES_PER_GIB),
    )


def vllm_spec(config: MasterConfig, checkpoint: Path) -> VllmSpec:
    """Settings of one vLLM engine.

    Args:
        config: a validated recipe whose rollout profile is resolved.
        checkpoint: folder with the weights it starts with.
    """
    generation, engine = config.policy.generation, config.policy.generation.vllm_cfg
    own = dict(generation.vllm_kwargs)
    return VllmSpec(
        model=str(checkpoint.resolve()),
        profile=config.policy.dsv4.rollout_profile,
        tokenizer=str(checkpoint.resolve()) if generation.stop_strings else None,
        tokenizer_mode=str(own.pop("tokenizer_mode", "auto")),
        tensor_parallel_size=engine.tensor_parallel_size,
        expert_parallel=engine.expert_parallel_size > 1,
        precision=engine.precision,
        kv_cache_dtype=engine.kv_cache_dtype,
        logprobs_mode=engine.logprobs_mode,
        max_model_len=engine.max_model_len or config.policy.max_total_sequence_length,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        use_deep_gemm=engine.use_deep_gemm,
        pow2_weight_scales=engine.pow2_weight_scaling_factors,
        pow2_activation_scales=engine.pow2_activation_scaling_factors,
        return_routed_experts=engine.enable_return_routed_experts,
        seed=config.grpo.seed,
        environment=engine.env_vars,
        engine_arguments=own,
    )


def check_one_host(config: MasterConfig) -> None:
    """The embedded runtime's engines share the policy's GPUs on one host; anything else is refused by name."""
    if config.policy.generation.backend != "vllm":
        return
    if config.cluster.num_nodes > 1:
        raise UserError(
            f"cluster.num_nodes is {config.cluster.num_nodes}; the embedded runtime's vLLM engines run on one host: "
            "set 1, or use runtime nemo_rl"
        )
    if not config.policy.generation.colocated.enabled:
        raise UserError(
            "policy.generation.colocated.enabled is false; the embedded runtime's vLLM engines share the policy's "
            "GPUs: set true, or use runtime nemo_rl"
        )
    if config.policy.generation.vllm_cfg.async_engine:
        raise UserError(
            "policy.generation.vllm_cfg.async_engine is true; the embedded runtime rolls out whole batches: set false"
        )
