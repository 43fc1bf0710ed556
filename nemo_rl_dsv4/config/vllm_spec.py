"""From a recipe to the settings of one vLLM engine."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.generation.rollout_facts import named_profile
from nemo_rl_dsv4.generation.served_model import check_served_model
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec


def vllm_spec(config: MasterConfig, checkpoint: Path) -> VllmSpec:
    """Settings of one vLLM engine.

    Args:
        config: a recipe; its rollout profile is resolved where an engine is started with the result.
        checkpoint: folder with the weights it starts with.

    Raises:
        UserError: see `check_served_model`, where the folder is there.
    """
    if (checkpoint / "config.json").is_file():
        quantized = config.policy.generation.vllm_cfg.precision == "fp8"
        check_served_model(checkpoint, config.policy.hf_config_overrides, quantized=quantized)
    generation, engine = config.policy.generation, config.policy.generation.vllm_cfg
    own = dict(generation.vllm_kwargs)
    return VllmSpec(
        model=str(checkpoint.resolve()),
        profile=config.policy.dsv4.rollout_profile,
        tokenizer=str(checkpoint.resolve()) if generation.stop_strings else None,
        tokenizer_mode=own.pop("tokenizer_mode", "auto"),
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
        sleep_mode=config.policy.dsv4.engine_sleep,
        refit_checks=config.policy.dsv4.refit.checks,
        refit_on_finding=config.policy.dsv4.refit.on_finding,
        refit_direct=_writes_directly(config),
        seed=config.grpo.seed,
        window_yarn=config.policy.dsv4.alignment.yarn_on_window_layers,
        environment=engine.env_vars,
        engine_arguments=own,
    )


def _writes_directly(config: MasterConfig) -> bool:
    """`policy.dsv4.refit.direct`, or where it is null, whether engines are such as it was run with."""
    chosen = config.policy.dsv4.refit.direct
    if chosen is not None:
        return chosen
    dsv4 = config.policy.dsv4
    alone = config.policy.generation.vllm_cfg.tensor_parallel_size == 1 and not dsv4.engine_sleep
    return alone and named_profile(dsv4.rollout_profile, dsv4.gpu) == "vllm-hopper"
