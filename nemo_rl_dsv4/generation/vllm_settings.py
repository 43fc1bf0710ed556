"""Environment and arguments of a vLLM engine, decided by the rollout profile and checked against the recipe.

The kernels that an engine takes depend on a handful of environment variables and arguments. A profile says what the
engine must compute; this module says which settings make vLLM 0.25 to 0.33 compute it, and refuses a recipe that says
otherwise. It knows neither vLLM nor torch: everything here is plain data, and a dry run checks it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.rollout_facts import Named, facts_of
from nemo_rl_dsv4.generation.vllm_arguments import DEFAULT_SEQUENCES, check_values
from nemo_rl_dsv4.generation.vllm_refusals import VARIABLES, check_arguments, check_own_variables, check_variables

KV_BLOCK_SIZE = 256
"""Tokens of a KV cache block that DeepSeek-V4's cache layouts need."""

WORKER_EXTENSION = "nemo_rl_dsv4.generation.vllm_worker.NumericsWorkerExtension"
"""Receives weights inside the engine's workers, and says what they compute with."""

VLLM_PYTHON = ".venv-vllm/bin/python"
"""Where vLLM's own environment is looked for."""

MAKE_VLLM = "UV_PROJECT_ENVIRONMENT=.venv-vllm uv sync --no-default-groups --extra vllm"
"""The command that makes it."""

KERNEL_SIZES = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""Key of config.json -> the one size that vLLM's FlashMLA and indexer kernels are built for."""

KERNEL_MULTIPLES = ("q_lora_rank", "o_lora_rank", "moe_intermediate_size")
"""Keys of config.json that are sides of FP8 blocks."""

KV_DTYPES_FP8 = ("fp8", "fp8_e4m3", "fp8_ds_mla")


@dataclass(frozen=True)
class VllmSpec:
    """One vLLM engine, as plain data that travels to its process.

    Attributes:
        model: folder with config.json and the weights in release format.
        tokenizer: name or folder, read only where stop strings need text; None loads none.
        tokenizer_mode: vLLM's word for how to read it.
        profile: name of the rollout profile.
        tensor_parallel_size: GPUs of the engine.
        expert_parallel: spread experts over those GPUs instead of cutting each.
        precision: `bfloat16`, `float32` or `fp8`, the recipe's word for weights and products.
        kv_cache_dtype: the recipe's word for the KV cache.
        logprobs_mode: `raw_logprobs` (before temperature) or `processed_logprobs`.
        max_model_len: most tokens of prompt and response together.
        max_num_seqs: most sequences in flight.
        gpu_memory_utilization: share of a GPU's memory for the engine.
        kv_cache_memory_bytes: size of the KV pool; None lets the engine measure, which `sleep_mode` refuses.
        enforce_eager: no CUDA graphs.
        use_deep_gemm: DeepGEMM's products.
        pow2_weight_scales: weight scales are powers of two.
        pow2_activation_scales: activation scales are powers of two.
        return_routed_experts: give the experts of every token.
        refit_checks: weights compared with what was sent after each refit: `sampled` or `all`.
        refit_on_finding: `stop` raises when a refit is found wrong, `warn` only reports it.
        refit_direct: write weights into the kernels' memory where that was shown to be right (`refit.direct`).
        sleep_mode: the engine can give its memory back between rollouts.
        seed: of the engine.
        window_yarn: the trainer applies YaRN on ratio-0 layers; None: as the profile says.
        environment: the recipe's own variables; they may not contradict the profile.
        engine_arguments: the recipe's own arguments (`vllm_kwargs`), likewise.
    """

    model: str
    profile: str
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    precision: str = "fp8"
    kv_cache_dtype: str = "fp8"
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int = 2048
    max_num_seqs: int = DEFAULT_SEQUENCES
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    use_deep_gemm: bool = True
    pow2_weight_scales: bool = True
    pow2_activation_scales: bool = True
    return_routed_experts: bool = False
    refit_checks: Literal["sampled", "all"] = "sampled"
    refit_on_finding: Literal["stop", "warn"] = "stop"
    refit_direct: bool = False
    sleep_mode: bool = False
    seed: int = 0
    window_yarn: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Most requests of one task: all, since the engine batches them itself."""
        return 1 << 30

    @property
    def capture_routes(self) -> bool:
        """Whether completions carry routed experts."""
        return self.return_routed_experts


def engine_environment(profile: Named, own: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of an engine's processes.

    Args:
        profile: what the engine must compute.
        own: variables of the recipe (`policy.generation.vllm_cfg.env_vars`).

    Raises:
        UserError: a variable of the recipe would make the engine round otherwise than the profile says, or is left to
            this package.
    """
    facts = facts_of(profile)
    deep_gemm = facts.deep_gemm
    check_own_variables(own)
    check_variables(own, facts)
    numeric = {
        "VLLM_USE_DEEP_GEMM": "1" if deep_gemm else "0",
        "VLLM_USE_DEEP_GEMM_E8M0": "1" if deep_gemm else "0",
        # FlashInfer's products of small batches round activations by another rule than DeepGEMM's.
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }
    for name, wanted in numeric.items():
        if name in own and _flag(own[name]) != _flag(wanted):
            raise UserError(
                f"policy.generation.vllm_cfg.env_vars.{name} is {own[name]!r}, but rollout profile {profile.name} "
                f"needs {wanted!r}: with the other value the engine rounds activations by another rule than the "
                "trainer; drop the variable or change policy.dsv4.rollout_profile"
            )
    housekeeping = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "0", "VLLM_DP_SIZE": "1"}
    return {**housekeeping, **own, **numeric}


def check_hidden_size(hidden_size: int, where: str) -> None:
    """Refuse a width at which vLLM's hyper-connection kernel leaves its output unwritten.

    With fewer than 8 tokens in a batch the kernel (`mhc_fused_tilelang` of vLLM 0.25 to 0.29) cuts a width of up to
    4096 into 8 parts, a larger one into 4, and each part into whole blocks of 256. What does not fill a block is not
    written, and the next layer reads memory that nobody wrote. Seen on an H200 with a width of 1024: garbage for the
    last tokens of the longest responses, sometimes NaN.

    Args:
        hidden_size: of the model.
        where: what says so, for the message.

    Raises:
        UserError: the width does not divide into whole blocks.
    """
    parts = 8 if hidden_size <= 4096 else 4
    if hidden_size % (parts * 256):
        raise UserError(
            f"{where} is {hidden_size}; vLLM's hyper-connection kernel needs a multiple of {parts * 256} there, or it "
            "leaves memory unwritten whenever fewer than 8 sequences decode"
        )


def check_kernel_shapes(sizes: Mapping[str, int | None], where: str) -> None:
    """Refuse sizes that vLLM's Hopper kernels do not take (seen with 0.26.0), before a model is made.

    Args:
        sizes: by their names in config.json; None is not known yet.
        where: what says so, for the message.

    Raises:
        UserError: the key, its value and what is wanted.
    """
    for key, wanted in KERNEL_SIZES.items():
        found = sizes.get(key)
        if found is not None and found != wanted:
            raise UserError(f"{key} of {where} is {found}; vLLM's attention kernels take {wanted} only")
    for key in KERNEL_MULTIPLES:
        found = sizes.get(key)
        if found is not None and found % 128:
            raise UserError(f"{key} of {where} is {found}; vLLM's FP8 kernels take multiples of 128 only")


def _flag(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false")


def engine_arguments(spec: VllmSpec, profile: Named) -> dict[str, Any]:
    """Keyword arguments of vLLM's engine.

    Raises:
        UserError: see `check_agreement`; also an argument under `vllm_kwargs` that has a key of its own, that decides
            numbers or parallel sizes, or whose value vLLM does not take.
    """
    check_agreement(spec, profile)
    check_arguments(spec.engine_arguments)
    check_values({**spec.engine_arguments, "tokenizer_mode": spec.tokenizer_mode})
    arguments: dict[str, Any] = {
        "model": spec.model,
        "skip_tokenizer_init": spec.tokenizer is None,
        # No sampling defaults and no extra stop tokens from the model's folder: the recipe says them all.
        "generation_config": "vllm",
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enable_expert_parallel": spec.expert_parallel,
        "dtype": "float32" if spec.precision == "float32" else "bfloat16",
        "kv_cache_dtype": spec.kv_cache_dtype,
        "block_size": KV_BLOCK_SIZE,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enforce_eager": spec.enforce_eager,
        "logprobs_mode": spec.logprobs_mode,
        "enable_return_routed_experts": spec.return_routed_experts,
        "enable_sleep_mode": spec.sleep_mode,
        # Cached blocks of the weights before a refit would be read as if they were of those after it.
        "enable_prefix_caching": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "seed": spec.seed,
    }
    if spec.tensor_parallel_size > 1:
        # vLLM would start Ray workers of its own when it finds itself in a Ray actor with a placement group.
        arguments["distributed_executor_backend"] = "mp"
    if spec.tokenizer is not None:
        arguments |= {"tokenizer": spec.tokenizer, "tokenizer_mode": spec.tokenizer_mode}
    if spec.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = spec.kv_cache_memory_bytes
    if "seed" in spec.engine_arguments:
        raise UserError(
            f"policy.generation.vllm_kwargs.seed is {spec.engine_arguments['seed']!r}, but the engines' seed is "
            f"grpo.seed ({spec.seed}); set it there and drop it here"
        )
    taken = sorted(set(spec.engine_arguments) & set(arguments) - {"max_num_seqs", "kv_cache_memory_bytes"})
    if taken:
        raise UserError(
            f"policy.generation.vllm_kwargs.{taken[0]} is set, but it follows from policy.generation.vllm_cfg and the "
            "rollout profile; set the key there and drop it here"
        )
    return {**arguments, **spec.engine_arguments}


def check_agreement(spec: VllmSpec, profile: Named) -> None:
    """Settings that decide the rollout's numbers say the same as the profile that the trainer rounds by.

    The size of the KV pool, where one is stated, is a number of bytes; an engine that sleeps has one stated.

    Raises:
        UserError: the pair of keys that contradict each other, their values, and what would fit.
    """
    where, named = "policy.generation.vllm_cfg", f"policy.dsv4.rollout_profile is {profile.name}"
    facts = facts_of(profile)
    quantized, deep_gemm, fp8_kv = facts.quantized, facts.deep_gemm, facts.fp8_kv
    pool = spec.engine_arguments.get("kv_cache_memory_bytes", spec.kv_cache_memory_bytes)
    pairs: list[tuple[bool, str]] = [
        (
            (spec.precision == "fp8") == quantized,
            f"{where}.precision is {spec.precision} but {named}, whose products are "
            f"{'FP8' if quantized else 'not quantized'}; set precision to {'fp8' if quantized else 'bfloat16'}",
        ),
        (
            not deep_gemm or spec.use_deep_gemm,
            f"{where}.use_deep_gemm is false but {named}, whose power-of-two activation scales only DeepGEMM makes; "
            "set it to true",
        ),
        (
            not quantized or spec.pow2_weight_scales,
            f"{where}.pow2_weight_scaling_factors is false but {named} and its weight scales are powers of two; "
            "set it to true",
        ),
        (
            not deep_gemm or spec.pow2_activation_scales,
            f"{where}.pow2_activation_scaling_factors is false but {named} and its activation scales are powers of "
            "two; set it to true",
        ),
        (
            not fp8_kv or spec.kv_cache_dtype in KV_DTYPES_FP8,
            f"{where}.kv_cache_dtype is {spec.kv_cache_dtype} but {named}, whose KV cache is FP8; set it to fp8_ds_mla",
        ),
        (
            fp8_kv or spec.kv_cache_dtype == "auto",
            f"{where}.kv_cache_dtype is {spec.kv_cache_dtype} but {named}, which quantizes no KV cache; set it to auto",
        ),
        (
            pool is None or (isinstance(pool, int) and not isinstance(pool, bool) and pool > 0),
            f"policy.generation.vllm_kwargs.kv_cache_memory_bytes is {pool!r}; wanted a whole number of bytes above 0, "
            "such as 8000000000",
        ),
        (
            not spec.sleep_mode or pool is not None,
            "policy.dsv4.engine_sleep is true but policy.generation.vllm_kwargs.kv_cache_memory_bytes is not set: an "
            "engine that measures its KV pool again when it wakes finds other memory free than before; set the "
            "pool's bytes there",
        ),
    ]
    for holds, message in pairs:
        if not holds:
            raise UserError(message)


def engine_findings(reported: Mapping[str, Any], profile: Named) -> list[str]:
    """What a running engine says of itself against the profile; an empty list means that they agree.

    Args:
        reported: `describe()` of the engine: `vllm`, `kv_cache_dtype`, `logprobs_mode`, `environment` (name -> value
            as the worker process sees it), `capability` [major, minor] and `architecture` of the GPU.
        profile: what the trainer rounds by.
    """
    from nemo_rl_dsv4.numerics.devices import profile_of_hardware

    findings = []
    for name, wanted in engine_environment(profile, {}).items():
        found = reported["environment"].get(name)
        if name.startswith(("VLLM_USE", "VLLM_BLOCKSCALE")) and (found is None or _flag(found) != _flag(wanted)):
            findings.append(f"the engine's process has {name}={found!r}; profile {profile.name} needs {wanted!r}")
    try:
        check_variables(reported["environment"], facts_of(profile))
    except UserError as error:  # inherited from where the cluster was started
        findings.append(str(error).replace(VARIABLES, "the engine's process has"))
    if facts_of(profile).fp8_kv and reported["kv_cache_dtype"] not in KV_DTYPES_FP8:
        findings.append(f"the engine's KV cache is {reported['kv_cache_dtype']}; profile {profile.name} has FP8")
    if facts_of(profile).quantized:
        actual = profile_of_hardware(tuple(reported["capability"]), reported.get("architecture", ""))
        if actual.name != profile.name:
            findings.append(f"the engine's GPU rounds by {actual.name}; the trainer rounds by {profile.name}")
    return findings
