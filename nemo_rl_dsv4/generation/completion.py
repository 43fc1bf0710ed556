"""What an engine gives back for one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Completion:
    """One finished sequence.

    Attributes:
        tokens: sampled ids, stop token included.
        logprobs: float32, one per sampled id.
        truncated: the length limit ended it, not a stop.
        routed_experts: int16 [tokens - 1, layers, top-k], the experts that every layer gave to each token of prompt
            and response but the last, which is never fed back; None where the engine does not record them.
    """

    tokens: list[int]
    logprobs: list[float]
    truncated: bool
    routed_experts: torch.Tensor | None = None
