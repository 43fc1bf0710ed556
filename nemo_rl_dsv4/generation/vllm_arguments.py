"""Values that vLLM's engine takes for its arguments, so that those of a recipe are checked before anything starts.

Names and types: vLLM 0.26.0 `vllm/engine/arg_utils.py` EngineArgs and the classes of `vllm/config`. An argument that is
not listed may be another version's; the engine itself refuses what it does not know, before it reads weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_dsv4.errors import UserError

ARGUMENTS = "policy.generation.vllm_kwargs"
DEFAULT_SEQUENCES = 256
"""`max_num_seqs` of an engine whose recipe does not say it."""


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _one_of(*words: str) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words


COUNT = ("a whole number, at least 1", _whole(1))
SIZE = ("a whole number, at least 0", _whole(0))
CAP = ("a whole number, at least -1 (no limit)", _whole(-1))
NUMBER = ("a finite number, at least 0", _number)
FLAG = ("true or false", lambda value: isinstance(value, bool))
TEXT = ("text", lambda value: isinstance(value, str) and bool(value))
MAPPING = ("a mapping", lambda value: isinstance(value, Mapping))
LIST = ("a list", lambda value: isinstance(value, list))
LEVEL = (
    "a mapping, or a level from 0 to 3",
    lambda value: isinstance(value, Mapping) or (SIZE[1](value) and value < 4),
)
SAFETENSORS = _one_of("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "modelexpress")
TOKENIZERS = _one_of("auto", "hf", "slow", "deepseek_v32", "deepseek_v4")

_BY_KIND: tuple[tuple[tuple[str, Callable[[Any], bool]], str], ...] = (
    (
        COUNT,
        "max_num_seqs max_num_batched_tokens? max_num_partial_prefills max_long_partial_prefills stream_interval "
        "max_parallel_loading_workers? num_gpu_blocks_override? distributed_timeout_seconds? "
        "cpu_distributed_timeout_seconds? safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "offload_num_in_group renderer_num_workers prefix_match_unit?",
    ),
    (
        SIZE,
        "max_num_scheduled_tokens? long_prefill_token_threshold offload_group_size offload_prefetch_step "
        "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold prefill_schedule_interval "
        "shutdown_timeout mm_shm_cache_max_object_size_mb max_cudagraph_capture_size?",
    ),
    (CAP, "max_logprobs"),
    (NUMBER, "cpu_offload_gb kv_offloading_size? watermark mm_processor_cache_gb mm_ipc_gpu_memory_gb"),
    (
        FLAG,
        "trust_remote_code enable_chunked_prefill? async_scheduling? disable_hybrid_kv_cache_manager? "
        "disable_custom_all_reduce disable_cascade_attn disable_sliding_window disable_chunked_mm_input "
        "disable_log_stats disable_nccl_for_dp_synchronization? enable_dbo enable_elastic_ep enable_ep_weight_filter "
        "enable_eplb enable_lora enable_prompt_embeds enable_mm_embeds enable_mfu_metrics enable_mm_processor_stats "
        "enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_flashinfer_autotune? "
        "enable_bf16x3_router_gemm? enable_cumem_allocator allow_deprecated_quantization aggregate_engine_logging "
        "calculate_kv_scales cudagraph_metrics fail_on_environ_validation jit_monitor_verbose kv_cache_metrics "
        "kv_sharing_fast_prefill language_model_only mm_encoder_only numa_bind ray_workers_use_nsight "
        "scheduler_reserve_full_isl skip_mm_profiling tokens_only use_fp64_gumbel use_tqdm_on_load",
    ),
    (
        TEXT,
        "download_dir? safetensors_load_strategy? attention_backend? all2all_backend offload_backend "
        "kv_offloading_backend dcp_comm_backend prefix_caching_hash_algo expert_placement_strategy performance_mode "
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode otlp_traces_endpoint? "
        "show_hidden_metrics_for_version?",
    ),
    (
        MAPPING,
        "kernel_config attention_config mamba_config additional_config model_loader_extra_config limit_mm_per_prompt "
        "media_io_kwargs mm_processor_kwargs? structured_outputs_config profiler_config kv_events_config? "
        "reasoning_config eplb_config ir_op_priority",
    ),
    (LIST, "cudagraph_capture_sizes? allowed_media_domains? numa_bind_nodes? numa_bind_cpus? collect_detailed_traces?"),
    (LEVEL, "compilation_config"),
    (SAFETENSORS, "load_format"),
    (TOKENIZERS, "tokenizer_mode"),
    (_one_of("fcfs", "priority"), "scheduling_policy"),
)
"""What is wanted and what is taken -> names, each with a question mark where null is taken as well."""
KINDS = {
    name.removesuffix("?"): (wanted, takes, name.endswith("?"))
    for (wanted, takes), names in _BY_KIND
    for name in names.split()
}


def check_values(own: Mapping[str, Any]) -> None:
    """The recipe's own engine arguments have values that vLLM takes.

    Args:
        own: `policy.generation.vllm_kwargs`.

    Raises:
        UserError: the argument, its value and what is wanted.
    """
    for key, value in own.items():
        wanted, takes, or_null = KINDS.get(key, ("", lambda _: True, True))
        if not (takes(value) or (or_null and value is None)):
            raise UserError(f"{ARGUMENTS}.{key} is {value!r}; wanted {wanted}, or drop it")
    tokens, sequences = own.get("max_num_batched_tokens"), own.get("max_num_seqs", DEFAULT_SEQUENCES)
    if tokens is not None and tokens < sequences:
        raise UserError(
            f"{ARGUMENTS}.max_num_batched_tokens is {tokens}, less than max_num_seqs = {sequences}: a step takes a "
            f"token of each sequence; set it to at least {sequences}, or lower {ARGUMENTS}.max_num_seqs"
        )
