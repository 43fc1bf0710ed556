"""The vLLM engine's share of a GPU: FP8 or BF16 weights over its tensor-parallel ranks, and the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind
from nemo_rl_dsv4.planning.hardware import RUNTIME_BYTES

KV_ENTRY_BYTES = 584
"""fp8_ds_mla: 448 e4m3 + 64 bfloat16 + 8 scale bytes an entry."""
INDEX_KEY_BYTES = 132
"""128 e4m3 and one float32 scale an entry, on layers with an indexer (ratio 4)."""
BF16_KV_ENTRY_BYTES = 1024
BF16_INDEX_KEY_BYTES = 256
WHOLE_ON_EVERY_RANK = (".wq_a.", ".wkv.", ".compressor.", ".gate.", ".hc_", "norm", ".indexer.", "hc_head")
"""Parts of names that vLLM does not divide over tensor-parallel ranks: latent projections, routers, mixers, norms."""


@dataclass(frozen=True)
class EnginePlan:
    """Bytes on each GPU of one engine, and how many tokens its KV pool holds.

    `budget` is weights, runtime and pool; `kv_windows` is what the sliding windows take of the pool.
    """

    weights: int
    budget: int
    kv_pool: int
    kv_windows: int
    kv_bytes_per_token: float
    kv_bytes_per_sequence: int
    sequences_per_engine: int
    tokens_wanted: int

    @property
    def tokens_held(self) -> int:
        """Tokens of full-length sequences that fit the pool at once."""
        left = self.kv_pool - self.kv_windows
        return max(int(left / self.kv_bytes_per_token), 0) if self.kv_bytes_per_token else 0


def weight_bytes_per_rank(hf_config: Mapping[str, Any], *, fp8: bool, tensor_parallel: int) -> int:
    """Weights of one tensor-parallel rank; FP8 with one float32 scale a 128x128 block where the checkpoint has one."""
    total = 0
    for name, shape in expected_tensors(hf_config).items():
        numel = 1
        for size in shape:
            numel *= size
        kind = tensor_kind(name)
        if kind == "integer":
            size = numel * 8
        elif fp8 and kind in ("linear.weight", "expert.weight"):
            size = numel + -(-shape[-2] // 128) * -(-shape[-1] // 128) * 4
        else:
            size = numel * 2
        whole = kind == "integer" or any(part in name for part in WHOLE_ON_EVERY_RANK)
        total += size if whole else size // tensor_parallel
    return total


def kv_bytes(hf_config: Mapping[str, Any], *, fp8: bool) -> tuple[float, int]:
    """KV cache bytes of a token, and those of a sequence whatever its length (its sliding windows).

    A layer keeps the last `sliding_window` tokens, and one entry for every `ratio` tokens; ratio 4 adds an index key.
    """
    entry = KV_ENTRY_BYTES if fp8 else BF16_KV_ENTRY_BYTES
    key = INDEX_KEY_BYTES if fp8 else BF16_INDEX_KEY_BYTES
    ratios = hf_config["compress_ratios"][: hf_config["num_hidden_layers"]]
    per_token = sum((entry + (key if ratio == 4 else 0)) / ratio for ratio in ratios if ratio)
    return per_token, len(ratios) * hf_config["sliding_window"] * entry


def plan_engine(
    hf_config: Mapping[str, Any],
    *,
    gpu: int | None,
    utilization: float,
    pool: int | None,
    tensor_parallel: int,
    engines: int,
    sequences: int,
    length: int,
    fp8_weights: bool,
    fp8_kv: bool,
) -> EnginePlan:
    """Divide an engine's share of one GPU; as in vLLM, a pool of a stated size has no regard to the share.

    Args:
        hf_config: official-style configuration.
        gpu: memory of the GPU in bytes; None needs a stated pool.
        utilization: `vllm_cfg.gpu_memory_utilization`.
        pool: `vllm_kwargs.kv_cache_memory_bytes`; None leaves to the pool what weights and runtime leave of the share.
        tensor_parallel: ranks of one engine.
        engines: engines in the cluster.
        sequences: sequences of one step, dealt over the engines.
        length: longest sequence.
        fp8_weights: `vllm_cfg.precision` is fp8.
        fp8_kv: the KV cache is fp8_ds_mla.
    """
    weights = weight_bytes_per_rank(hf_config, fp8=fp8_weights, tensor_parallel=tensor_parallel)
    if pool is None:
        assert gpu is not None
        pool = int(gpu * utilization) - weights - RUNTIME_BYTES
    per_token, per_sequence = kv_bytes(hf_config, fp8=fp8_kv)
    here = -(-sequences // engines)
    return EnginePlan(
        weights=weights,
        budget=weights + RUNTIME_BYTES + pool,
        kv_pool=pool,
        kv_windows=min(here, 256) * per_sequence,
        kv_bytes_per_token=per_token,
        kv_bytes_per_sequence=per_sequence,
        sequences_per_engine=here,
        tokens_wanted=here * length,
    )
