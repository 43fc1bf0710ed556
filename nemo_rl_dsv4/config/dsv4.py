"""Section `policy.dsv4`: what this package adds to a NeMo-RL recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_dsv4.config.section import OpenMapping, PathName, Section

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
GpuName = Literal["h100", "h200", "b200", "gb200", "mi300x", "mi355x"]
TrainMode = Literal["bf16", "qat", "fp8"]
ProfileName = Literal[
    "auto",
    "bf16",
    "vllm-hopper",
    "vllm-blackwell",
    "vllm-rocm-gfx950",
    "vllm-rocm-gfx950-bf16",
    "vllm-rocm-gfx942",
    "deepseek-reference",
]


class FakeQuant(Section):
    """Which tensors the trainer rounds the way the rollout does. Null follows `train_mode`: off in `bf16`, else on."""

    weights: bool | None = None
    """Weights of quantized linear layers and of the experts."""
    linear_inputs: bool | None = None
    """Inputs of quantized linear layers."""
    o_proj: bool | None = None
    """Input of the attention output projection."""
    experts: bool | None = None
    """Input of the routed experts, and what stands between their two products."""
    kv: bool | None = None
    """Entries of the KV cache, sliding-window and compressed."""
    indexer: bool | None = None
    """Queries and keys of the sparse-attention indexer."""

    def resolved(self, train_mode: TrainMode) -> dict[str, bool]:
        """Site group -> whether it is rounded in training, nulls replaced by what `train_mode` means."""
        follow = train_mode != "bf16"
        return {name: follow if value is None else value for name, value in self}


class Alignment(Section):
    """What else the trainer computes as the rollout engine does, beyond rounding sites. Null: as the profile says.

    `nemo-rl-dsv4 profiles NAME` prints each profile's defaults and sources. All but `routing_weight_after_down` and
    `yarn_on_window_layers` move BF16 casts only and change nothing with `policy.precision: float32`.
    """

    rope_fp32: bool | None = None
    """Rotary tables stay in float32."""
    query_norm_fp32: bool | None = None
    """Query heads are normalized and rotated in float32 and rounded once."""
    attention_fp32: bool | None = None
    """Attention logits and softmax in float32 (`attn: sdpa`; `tilelang` does it by itself)."""
    attention_probs_bf16: bool | None = None
    """Attention weights are rounded to BF16 in blocks of 64 keys (`attn: sdpa`; `tilelang` does it by itself)."""
    compressor_fp32: bool | None = None
    """Compressed entries and indexer keys stay in float32 until they are rounded for the cache."""
    hc_mix_fp32: bool | None = None
    """Hyper-connections mix streams with float32 coefficients and one cast."""
    hc_tf32: bool | None = None
    """Hyper-connection coefficients come from TF32 weights."""
    hc_norm_fp32: bool | None = None
    """Norms take the mean square of the collapsed streams before their cast."""
    gate_fp32: bool | None = None
    """Router logits in float32."""
    routing_weights_fp32: bool | None = None
    """Routing weights in float32."""
    routing_weight_after_down: bool | None = None
    """The routing weight multiplies after the down projection; rounding `experts` needs it."""
    silu_bf16_steps: bool | None = None
    """Expert hidden states are rounded to BF16 after the steps that the engine rounds after."""
    logits_bf16: bool | None = None
    """lm_head multiplies with BF16 weights and leaves BF16 logits."""
    yarn_on_window_layers: bool | None = None
    """YaRN on ratio-0 layers too, as vLLM up to 0.29 has it."""

    def chosen(self) -> dict[str, bool]:
        """The switches that a recipe sets; the others follow the rollout profile."""
        return {name: value for name, value in self if value is not None}


class Refit(Section):
    """How new weights reach the rollout engines, and what is looked at in an engine afterwards."""

    transport: Literal["auto", "cuda_ipc", "shared_memory", "broadcast", "folder"] = "auto"
    """To vLLM engines: GPU memory that a policy rank shares with the engine worker on its GPU, memory of the host,
    NCCL between GPUs, or files (which stay until the next refit). `auto` takes `cuda_ipc` where every worker shares a
    GPU with a rank, else `shared_memory` where every worker's host has one, else `broadcast`, and logs why."""
    folder: PathName | None = None
    """Where `transport: folder` puts its files: with several nodes a folder that all of them share. Null for memory of
    the one host (`/dev/shm`)."""
    checks: Literal["sampled", "all"] = "sampled"
    """Weights whose values in the engine are compared with what was sent: 48, drawn anew each time, beside sinks, hash
    tables and router biases; or all."""
    on_finding: Literal["stop", "warn"] = "stop"
    """A refit that is found wrong ends the run, or is logged under `refit/findings` and the run goes on."""
    direct: bool | None = None
    """Write weights straight into the memory of vLLM's kernels from the third refit on, if the first two have shown
    that vLLM's loaders do the same; else the log says why they go on. Null does so on Hopper where engines have
    one worker and stay awake, which was run (one H200, vLLM 0.26.0, docs/refit.md)."""


class WarmStart(Section):
    """Supervised steps on worked answers before RL, so that the tiny model has something to improve."""

    steps: NonNegative = 140
    """Optimizer steps; 0 leaves the random weights."""
    batch_size: Positive = 32
    """Worked answers in a step."""
    lr: Annotated[float, Field(gt=0.0)] = 3e-3
    """Learning rate of AdamW at the first step; it falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay."""
    betas: list[Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's momentum factors."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradient norm is clipped to this."""
    careless_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.4
    """Share of demonstrations that stop after the first step of a problem: a habit for RL to remove."""


class TinyModel(Section):
    """A whole DeepSeek-V4, only small: every kind of layer, made on the first run. Used when `model_name` is `tiny`."""

    hidden_size: Positive = 128
    """Width of the residual stream."""
    num_hidden_layers: Positive = 5
    """Transformer layers."""
    compress_ratios: list[Literal[0, 4, 128]] = [0, 0, 4, 128, 4]
    """One per layer: 0 sees the sliding window only, 4 and 128 also compressed entries."""
    num_attention_heads: Positive = 4
    """Query heads; keys and values are shared by all."""
    head_dim: Positive = 80
    """Channels of a head, RoPE included."""
    qk_rope_head_dim: Positive = 16
    """Trailing channels of a head that carry RoPE."""
    q_lora_rank: Positive = 64
    """Width between the two query projections."""
    o_lora_rank: Positive = 64
    """Width between the two output projections, per group."""
    o_groups: Positive = 2
    """Groups of the first output projection; divides the heads."""
    sliding_window: Positive = 32
    """Tokens that every layer sees uncompressed."""
    index_n_heads: Positive = 4
    """Heads of the indexer."""
    index_head_dim: Positive = 32
    """Channels of an indexer head."""
    index_topk: Positive = 64
    """Compressed entries that the indexer lets through."""
    n_routed_experts: Positive = 8
    """Routed experts in a layer."""
    n_shared_experts: Positive = 1
    """Shared experts in a layer."""
    num_experts_per_tok: Positive = 2
    """Routed experts that a token visits."""
    moe_intermediate_size: Positive = 192
    """Width of an expert; 192 is one whole and one partial block of 128."""
    num_hash_layers: NonNegative = 1
    """Leading layers whose experts are looked up by token id."""
    swiglu_limit: Annotated[float, Field(gt=0.0)] = 10.0
    """Clamp of the expert activations."""
    routed_scaling_factor: Annotated[float, Field(gt=0.0)] = 1.5
    """Factor on the routing weights."""
    hc_mult: Positive = 4
    """Streams of the hyper-connections."""
    hc_sinkhorn_iters: Positive = 20
    """Sinkhorn iterations of the hyper-connections."""
    max_position_embeddings: Positive = 1024
    """Longest sequence the model takes."""
    rope_scaling: OpenMapping | None = None
    """YaRN of the compressed layers, as in a released config.json; null for none. vLLM wants one."""
    expert_format: Literal["fp4", "fp8"] = "fp4"
    """How the checkpoint stores the experts; a vLLM engine keeps the format it was started with."""
    seed: NonNegative = 42
    """Seed of the random weights and of the warm start."""
    cache_dir: PathName = "results/checkpoints"
    """Folder under which the finished checkpoint is kept, by a hash of these settings."""
    warm_start: WarmStart = WarmStart()
    """Supervised start."""


class DSV4(Section):
    """Numerics of training and rollout."""

    train_mode: TrainMode = "qat"
    """`bf16` rounds nothing, `qat` rounds where the rollout rounds, `fp8` also multiplies in FP8
    (emulated where no GPU does)."""
    rollout_profile: ProfileName = "auto"
    """The rollout's rounding rules; `auto` is resolved on the worker that owns the GPU."""
    fake_quant: FakeQuant = FakeQuant()
    """Exceptions to what `train_mode` rounds."""
    alignment: Alignment = Alignment()
    """Exceptions to what the rollout profile aligns beyond rounding."""
    router_replay: bool = False
    """Train, and compute logprobs, with the experts that the rollout chose."""
    router_overlap_metrics: bool = False
    """Record the rollout's experts and log how far the trainer's own choices agree, also without replay."""
    refit: Refit = Refit()
    """Transport and checks of the weights that engines get."""
    cpu_processes: Positive = 1
    """Policy processes when `cluster.gpus_per_node` is 0."""
    gpu: GpuName | None = None
    """GPU that the recipe was made for; `nemo-rl-dsv4 plan` counts its memory. Null: the plan has to be told."""
    engine_sleep: bool = False
    """vLLM engines give their GPU memory to the policy whenever they do not generate; colocated engines only."""
    trainer_sleep: bool = False
    """The policy keeps optimizer states in host memory during a refit and all it has while the engines generate."""
    vllm_python: PathName | None = None
    """Python of vLLM's own environment. Null takes `.venv-vllm/bin/python` if it is there, else the running Python."""
    tiny: TinyModel | None = None
    """The tiny model; needed when `policy.model_name` is `tiny`."""
