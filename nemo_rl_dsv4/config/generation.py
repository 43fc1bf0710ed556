"""Section `policy.generation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_dsv4.config.section import OpenMapping, Section

Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class GenerationResources(Section):
    """GPUs of a rollout that has its own."""

    gpus_per_node: Positive | None = None
    """GPUs for generation when the cluster is one node."""
    num_nodes: Positive | None = None
    """Nodes for generation when the cluster has several."""


class Colocated(Section):
    """Whether training and rollout take turns on the same GPUs."""

    enabled: bool = True
    """True: the same GPUs. False: generation has its own `resources`."""
    resources: GenerationResources = GenerationResources()
    """Read only when `enabled` is false."""


class VllmCfg(Section):
    """Engine settings that NeMo-RL passes to vLLM by name."""

    async_engine: bool = False
    """vLLM's asynchronous engine."""
    precision: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    """Numbers of the rollout's weights and matrix products."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"] = "auto"
    """Numbers of the KV cache; DeepSeek-V4 on GPUs uses `fp8_ds_mla`."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "raw_logprobs"
    """Whether logprobs are taken after or before temperature and the like."""
    tensor_parallel_size: Positive = 1
    """Tensor parallel ranks of one engine."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of one engine."""
    expert_parallel_size: Positive = 1
    """Expert parallel ranks of one engine."""
    gpu_memory_utilization: Probability = 0.6
    """Share of GPU memory that the engine may take."""
    max_model_len: Positive | None = None
    """Longest sequence of the engine; null for the policy's limit."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    use_tqdm: bool = True
    """A key of NeMo-RL's engines; without effect here, where the run has a progress bar of its own."""
    use_deep_gemm: bool = False
    """DeepGEMM's FP8 products."""
    pow2_weight_scaling_factors: bool = False
    """Weight scales are powers of two."""
    pow2_activation_scaling_factors: bool = False
    """Activation scales are powers of two."""
    num_last_layers_in_bf16: Annotated[int, Field(ge=0)] = 0
    """Last layers that stay in BF16."""
    num_first_layers_in_bf16: Annotated[int, Field(ge=0)] = 0
    """First layers that stay in BF16."""
    enable_return_routed_experts: bool = False
    """Return the experts of every token, for router replay."""
    enable_vllm_metrics_logger: bool = False
    """A key of NeMo-RL's asynchronous engines, which log the queues of vLLM; without effect here."""
    vllm_metrics_logger_interval: Annotated[float, Field(gt=0.0)] = 0.5
    """Seconds between two entries of that log; without effect here."""
    http_refit_api_key_env_var: None = None
    """Only null: weights do not travel over HTTP here."""
    reset_encoder_cache_after_weight_update: Literal[False] = False
    """Only ``false``: there is no image encoder."""
    http_refit_server_port: None = None
    """Only null."""
    zmq_refit_server_port: None = None
    """Only null."""
    env_vars: dict[str, str] = {}
    """Extra environment variables of the engine's processes; those that this package sets are refused."""
    refit_buffer_size_gb: Annotated[float, Field(gt=0.0, le=64.0)] | None = None
    """Size of a weight-transfer buffer in GiB, which holds the model's largest weight; null for 1."""


class ReferenceCfg(Section):
    """The CPU reference engine: transformers' DeepSeek-V4 with the rounding of `policy.dsv4.rollout_profile`."""

    num_workers: Positive = 1
    """Engine processes; prompts are dealt over them."""
    batch_size: Positive = 128
    """Sequences decoded at once by one engine."""
    length_slack: Annotated[int, Field(ge=0)] = 12
    """Prompts whose lengths differ by at most this many tokens are decoded together."""
    num_threads: Positive = 1
    """Torch threads of the engine's process."""
    experts: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How the expert products are batched."""


class Generation(Section):
    """Sampling, and the engine that does it."""

    backend: Literal["reference", "vllm"] = "vllm"
    """`reference` runs on a CPU; `vllm` needs GPUs."""
    max_new_tokens: Positive = 512
    """Longest response."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature in training."""
    top_p: Probability = 1.0
    """Nucleus sampling in training; 1 keeps every token."""
    top_k: Positive | None = None
    """Keep the k likeliest tokens in training; null keeps all."""
    val_temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature in validation; 0 is greedy."""
    val_top_p: Probability = 1.0
    """Nucleus sampling in validation."""
    val_top_k: Positive | None = None
    """Keep the k likeliest tokens in validation; null keeps all."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end a response, besides the end-of-sentence token."""
    stop_strings: list[str] | None = None
    """Texts that end a response."""
    port_range_low: Port = 3000
    """First port of NeMo-RL's engine servers; without effect here, where engines serve none."""
    port_range_high: Port = 4999
    """Last such port."""
    refit_transport: None = None
    """Only null: weights travel the way that the topology implies."""
    real_quant_export_cpu_offload: bool = True
    """A key of NeMo-RL's ModelOpt rollouts; without effect here."""
    refit_cfg: OpenMapping = {}
    """Settings of NeMo-RL's other refit transports; without effect here."""
    mcore_generation_config: OpenMapping = {}
    """Settings of NeMo-RL's Megatron rollout; without effect here."""
    colocated: Colocated = Colocated()
    """Sharing of GPUs between training and rollout."""
    reference_cfg: ReferenceCfg = ReferenceCfg()
    """Settings of `backend: reference`."""
    vllm_cfg: VllmCfg = VllmCfg()
    """Settings of `backend: vllm`."""
    vllm_kwargs: OpenMapping = {}
    """Further keyword arguments of vLLM's engine; what they may not decide is refused (docs/recipes.md)."""
