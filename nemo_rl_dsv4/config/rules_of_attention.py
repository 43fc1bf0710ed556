"""Rules of AutoModel's TileLang attention kernels, which check neither the GPU nor all head counts themselves.

The numbers are those of AutoModel 0.7.0, `deepseek_v4/optimized_kernels.py` (chunks of heads, padding up to 16) and
`deepseek_v4/kernels/tilelang_sparse_mla_{fwd,bwd}.py` (a block covers the next power of two, at least 16 heads).
"""

from __future__ import annotations

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.model_limits import model_limits
from nemo_rl_dsv4.config.rules import require

_BLOCKS = (16, 32, 64)
"""Heads that a kernel call may see: with another number its block reaches beyond the tensors."""


def check_attention(config: MasterConfig) -> None:
    """`attn: tilelang` goes with NVIDIA GPUs and with a number of heads that fills the kernels' blocks."""
    where = "policy.dtensor_cfg.automodel_kwargs.backend.attn"
    if config.policy.dtensor_cfg.automodel_kwargs.backend.attn != "tilelang":
        return
    profile = config.policy.dsv4.rollout_profile
    require(
        not profile.startswith("vllm-rocm"),
        f"{where} is tilelang but policy.dsv4.rollout_profile is {profile}: the kernels are tiled for NVIDIA GPUs (138 "
        "KiB of shared memory a block, where an MI300X has 64) and have not run on AMD ones; use sdpa",
    )
    limits = model_limits(config)
    heads, width = limits.num_attention_heads, limits.head_dim
    if heads is None or width is None:
        return
    require(
        width & (width - 1) == 0,
        f"{where} is tilelang but the model's head_dim is {width}; the kernels want a power of two: use sdpa",
    )
    chunk = 16 if width >= 256 else 64
    calls = {min(chunk, heads - start) for start in range(0, heads, chunk)} if heads >= 16 else {16}
    odd = sorted(calls - set(_BLOCKS))
    require(
        not odd,
        f"{where} is tilelang but the model's num_attention_heads is {heads}: its kernels take {chunk} heads at a time "
        f"(head_dim {width}), which leaves {odd[0] if odd else 0} where a block has "
        f"{' or '.join(map(str, (b for b in _BLOCKS if b <= chunk)))}; use sdpa",
    )
