"""Sampling from next-token logits, the same for any batch composition.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl_dsv4.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: most tokens to add, stop token included.
        temperature: logits are divided by it before sampling; 0 means greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; None or -1 keeps all.
        stop_token_ids: a sequence ends after any of these (the token stays in the output).
        stop_strings: a sequence ends once its text contains any of these.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"generation.max_new_tokens is {self.max_new_tokens}; wanted 1 or more")
        if self.temperature < 0:
            raise UserError(f"generation.temperature is {self.temperature}; wanted 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"generation.top_p is {self.top_p}; wanted a number in (0, 1]")
        if self.top_k is not None and self.top_k != -1 and self.top_k < 1:
            raise UserError(f"generation.top_k is {self.top_k}; wanted null, -1 or a positive integer")


def request_uniforms(seed: int, request_ids: list[int], length: int) -> torch.Tensor:
    """Draw the uniforms that will pick each request's tokens.

    A request's numbers depend on `seed` and its id alone, never on which requests share its batch or worker, so
    the same recipe samples the same text on one process or eight.

    Returns:
        [len(request_ids), length] float64 in [0, 1).
    """
    rows = []
    for request_id in request_ids:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + request_id * 7_919 + 17) % (2**63))
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)


def filter_probs(probs_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Zero what top-k and top-p exclude and renormalize. [B, V] in, [B, V] out, same dtype."""
    if params.top_k is not None and params.top_k != -1 and params.top_k < probs_BV.shape[-1]:
        kth = probs_BV.topk(params.top_k, dim=-1).values[:, -1:]
        probs_BV = torch.where(probs_BV < kth, torch.zeros_like(probs_BV), probs_BV)
        probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    if params.top_p < 1.0:
        ordered, order = probs_BV.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < params.top_p, ordered, torch.zeros_like(ordered))
        probs_BV = torch.zeros_like(probs_BV).scatter(-1, order, ordered)
        probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    return probs_BV


def sample_tokens(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Pick one token a sequence by inverting the cumulative distribution at `uniforms_B`.

    Args:
        logits_BV: raw next-token logits, any float dtype.
        uniforms_B: one number in [0, 1) a sequence.
        params: temperature and filters.

    Returns:
        [B] int64 token ids; a token of probability zero is never picked.
    """
    if params.temperature == 0:
        return logits_BV.argmax(-1)
    probs = filter_probs(torch.softmax(logits_BV.double() / params.temperature, dim=-1), params)
    cumulative = probs.cumsum(-1)
    target = uniforms_B.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)


def token_logprobs(logits_BV: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
    """Log-probability of the chosen tokens under the raw logits (before temperature), float32 [B]."""
    return torch.log_softmax(logits_BV.float(), dim=-1).gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
