"""What a rollout profile means for the engine's settings, as a light table: a dry run reads it without torch.

`nemo_rl_dsv4.numerics.profiles` is the source; `tests/unit/generation/test_vllm_settings.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Named(Protocol):
    """A profile of `nemo_rl_dsv4.numerics`, of which only the name is read."""

    @property
    def name(self) -> str:
        """Key of `FACTS`."""
        ...


@dataclass(frozen=True)
class RolloutFacts:
    """Yes-or-no facts of one profile.

    Attributes:
        name: the profile, as messages call it.
        quantized: weights and products are FP8.
        deep_gemm: activation scales are powers of two, which only DeepGEMM makes.
        fp8_kv: the KV cache and the indexer's queries and keys are FP8.
        fp8_o_proj: the input of the attention output projection is FP8.
    """

    name: str
    quantized: bool = True
    deep_gemm: bool = False
    fp8_kv: bool = True
    fp8_o_proj: bool = False


FACTS = {
    facts.name: facts
    for facts in (
        RolloutFacts("bf16", quantized=False, fp8_kv=False),
        RolloutFacts("vllm-hopper", deep_gemm=True, fp8_o_proj=True),
        RolloutFacts("vllm-blackwell", deep_gemm=True, fp8_o_proj=True),
        RolloutFacts("vllm-rocm-gfx950"),
        RolloutFacts("vllm-rocm-gfx950-bf16", quantized=False),
        RolloutFacts("vllm-rocm-gfx942"),
        RolloutFacts("deepseek-reference", deep_gemm=True),
    )
}
"""Profile -> facts."""
ANY_GPU = RolloutFacts("auto")
"""What all profiles that a GPU resolves to have in common; whether DeepGEMM is needed is not known yet."""
PROFILE_OF_GPU = {
    "h100": "vllm-hopper",
    "h200": "vllm-hopper",
    "b200": "vllm-blackwell",
    "gb200": "vllm-blackwell",
    "mi355x": "vllm-rocm-gfx950",
    "mi300x": "vllm-rocm-gfx942",
}
"""`policy.dsv4.gpu` -> the profile that `auto` resolves to there."""
BF16_WEIGHTS = "-bf16"
"""Ending of the profile of the same engine with BF16 weights."""


def facts_of(profile: Named) -> RolloutFacts:
    """Facts of a profile; facts themselves are returned as they are."""
    return profile if isinstance(profile, RolloutFacts) else FACTS[profile.name]


def named_profile(profile: str, gpu: str | None) -> str | None:
    """`policy.dsv4.rollout_profile`, or for auto what `policy.dsv4.gpu` implies: None where a worker decides."""
    return PROFILE_OF_GPU.get(gpu or "") if profile == "auto" else profile
