"""Section `policy`: model, batches, parallel sizes, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_dsv4.config.dsv4 import DSV4
from nemo_rl_dsv4.config.generation import Generation
from nemo_rl_dsv4.config.section import DisabledSection, KeysOf, OpenMapping, Section

Positive = Annotated[int, Field(ge=1)]


class Tokenizer(Section):
    """The tokenizer and its chat encoding."""

    name: str
    """A folder, a hub id, or `tiny` for the tiny model's own."""
    chat_template: str | None = "deepseek_v4"
    """Chat encoding; `deepseek_v4` is built in."""
    chat_template_kwargs: OpenMapping | None = None
    """Arguments of the chat encoding, such as `thinking`."""
    use_fastokens: Literal[False] = False
    """Only ``false``: another tokenizer implementation of NeMo-RL."""


class Backend(Section):
    """AutoModel's choice of implementation for each kind of layer."""

    target: str | None = Field(default=None, alias="_target_")
    """Class path that NeMo-RL writes here; only AutoModel's BackendConfig fits."""
    attn: Literal["sdpa", "eager", "tilelang"] = "sdpa"
    """Attention: `sdpa` and `eager` run anywhere, `tilelang` on NVIDIA GPUs (16, 32 or 64 heads a block)."""
    linear: Literal["torch", "te"] = "torch"
    """Linear layers."""
    rms_norm: Literal["torch", "torch_fp32", "te"] = "torch_fp32"
    """Norms."""
    experts: Literal["torch", "torch_mm", "te", "gmm"] = "torch"
    """Expert products: `torch` runs anywhere."""
    dispatcher: Literal["torch", "deepep", "hybridep", "uccl_ep"] = "torch"
    """How tokens reach their experts: `torch` gathers all of them (up to 8 ranks); the others need GPUs, a library."""
    rope_fusion: bool = False
    """Fused RoPE of TransformerEngine."""
    gate_precision: Literal["float32", "float64"] = "float32"
    """Numbers of the router; the rollout's is float32."""
    enable_hf_state_dict_adapter: bool = True
    """A key of AutoModel's checkpointing; without effect here, where names are always translated."""
    enable_fsdp_optimizations: bool = False
    """AutoModel's FSDP scheduling of expert layers; without effect here."""
    enable_deepep: bool | None = None
    """AutoModel's older way to ask for the `deepep` dispatcher."""
    fake_balanced_gate: Literal[False] = False
    """Only ``false``: routing is the model's own."""


class AutomodelKwargs(Section):
    """Arguments of the model's construction."""

    backend: Backend = Backend()
    """Implementations."""
    dequantize_base_checkpoint: bool = True
    """A key of AutoModel's loading; without effect here, where a quantized release is always dequantized."""
    use_liger_kernel: Literal[False] = False
    """Only ``false``."""
    force_hf: Literal[False] = False
    """Only ``false``: the model is AutoModel's own."""


class DTensorCfg(Section):
    """Parallel sizes and memory settings of the trainer."""

    v2: bool = Field(default=True, alias="_v2")
    """NeMo-RL's second DTensor worker; the only one that knows expert parallelism."""
    enabled: Literal[True] = True
    """Only ``true``: AutoModel trains through DTensor."""
    tensor_parallel_size: Positive = 1
    """Tensor parallel ranks; 1, because the model has no tensor-parallel plan."""
    context_parallel_size: Positive = 1
    """Ranks that share one sequence."""
    expert_parallel_size: Positive = 1
    """Ranks that share the experts; the same ranks as data and context parallel ones."""
    dp_replicate_size: Positive = 1
    """Copies of the sharded model."""
    sequence_parallel: Literal[False] = False
    """Only ``false``: it goes with tensor parallelism."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters in host memory between uses."""
    custom_parallel_plan: None = None
    """Only null."""
    defer_fsdp_grad_sync: bool = True
    """A key of NeMo-RL's worker; without effect here."""
    clear_cache_every_n_steps: Positive | None = None
    """Empty the allocator's cache every so many micro batches; null for never."""
    env_vars: dict[str, str] | None = None
    """Extra environment variables of the workers."""
    automodel_kwargs: AutomodelKwargs = AutomodelKwargs()
    """Model construction."""
    lora_cfg: DisabledSection = DisabledSection()
    """Only disabled: all weights train."""


class AdamWKwargs(Section):
    """Arguments of `torch.optim.AdamW`."""

    lr: Annotated[float, Field(gt=0.0)]
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay."""
    betas: list[Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay of the two moments."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the denominator."""
    foreach: bool | None = None
    """Torch's multi-tensor implementation; null lets torch choose."""
    fused: bool | None = None
    """Torch's fused implementation; null lets torch choose."""


class Optimizer(Section):
    """The optimizer by class path."""

    name: str = "torch.optim.AdamW"
    """Class path of a `torch.optim.Optimizer`, torch's or another package's."""
    kwargs: Annotated[OpenMapping, KeysOf(AdamWKwargs)]
    """Its arguments. `lr` is needed; AdamW's are checked before anything starts, others when the optimizer is made."""


class SchedulerStep(Section):
    """One part of the learning-rate schedule, or the steps at which the next part takes over."""

    name: str | None = None
    """Class path of a scheduler, torch's or another package's."""
    kwargs: OpenMapping | None = None
    """Its arguments."""
    milestones: list[Annotated[int, Field(ge=0)]] | None = None
    """Steps at which one part hands over to the next; stands alone, as the list's last item."""


class DynamicBatching(DisabledSection):
    """Micro-batches by token count; rows of alike length share one anyway."""


class SequencePacking(Section):
    """Several rows in one sequence, kept apart by the attention mask; each is padded to a multiple of 128."""

    enabled: bool = False
    """Pack in training and in scoring."""
    train_mb_tokens: Positive | None = None
    """Tokens of a training micro-batch; null for train_micro_batch_size longest rows."""
    logprob_mb_tokens: Positive | None = None
    """Tokens of a scoring micro-batch; null for logprob_batch_size longest rows."""
    algorithm: Literal["concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"] = (
        "modified_first_fit_decreasing"
    )
    """Which rows share a sequence."""
    sequence_length_round: Positive = 64
    """NeMo-RL's padding of packed rows; it must divide 128, which rows are padded to."""


class Policy(Section):
    """What is trained, and how it is laid out."""

    model_name: str
    """A checkpoint folder, a hub id, or `tiny` for the model of `policy.dsv4.tiny`."""
    tokenizer: Tokenizer
    """Tokenizer."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Numbers of activations and matrix products; master weights are float32."""
    hf_config_overrides: OpenMapping = {}
    """Values that replace those of the checkpoint's config.json."""
    train_global_batch_size: Positive = 512
    """Sequences of one optimizer step."""
    train_micro_batch_size: Positive = 1
    """Sequences of one forward and backward pass on one data-parallel rank."""
    generation_batch_size: Positive | None = None
    """A key of NeMo-RL's own CPU generation; without effect here."""
    logprob_batch_size: Positive = 1
    """Sequences of one scoring pass on one data-parallel rank."""
    logprob_chunk_size: Positive | None = None
    """Positions whose logits over the vocabulary exist at once, in scoring and in training; null for all."""
    offload_optimizer_for_logprob: bool = False
    """Move optimizer state to host memory while scoring."""
    max_total_sequence_length: Positive = 512
    """Longest prompt plus response."""
    make_sequence_length_divisible_by: Positive = 1
    """Batches are padded on the right to a multiple of this."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Gradient norm is clipped to this; null for no clipping."""
    dsv4: DSV4 = DSV4()
    """Numerics."""
    dtensor_cfg: DTensorCfg = DTensorCfg()
    """Layout."""
    optimizer: Optimizer
    """Optimizer."""
    scheduler: list[SchedulerStep] | None = None
    """Learning-rate schedule; null keeps the rate constant."""
    generation: Generation
    """Rollout."""
    dynamic_batching: DynamicBatching = DynamicBatching()
    """Only disabled: rows of alike length share a micro-batch anyway."""
    sequence_packing: SequencePacking = SequencePacking()
    """Several rows in one sequence."""
    megatron_cfg: DisabledSection = DisabledSection()
    """Only disabled: the trainer is AutoModel."""
    draft: DisabledSection = DisabledSection()
    """Only disabled: no draft model is trained."""
