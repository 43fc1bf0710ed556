"""Attention with a sink as FlashMLA computes it: softmax weights are rounded to BF16 before they meet the values.

Read in FlashMLA 9241ae3 (csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh scale_softmax, csrc/sm90/prefill/sparse/phase1.cuh
online_softmax_and_rescale_o) and in the machine code of vLLM 0.26.0's build of it. A query's keys come in blocks of 64:
its window in ascending order, padded to whole blocks, then its compressed entries. A block's weights are
`exp2(score * scale - m)` with m the largest scaled score up to that block. Rounded to BF16 they multiply the values;
unrounded they are summed. The sink joins the sum at the end.

This is the order of decoding, which makes the rollout's log-probabilities. Prefill (compressed entries first, half of
the channels relative to the next block's maximum) rounds the same way where a query has one block, that is up to 64
keys on layers without compression; decoding in small batches splits blocks between multiprocessors, each with a maximum
of its own.
"""

from __future__ import annotations

import math

import torch

BLOCK = 64
"""Keys of a block (B_TOPK)."""

LARGEST_POWER = 120.0
"""A sink so far above all scores leaves nothing of the output; the power itself would overflow, its gradient be NaN."""


def blocks_of_keys(visible: torch.Tensor, window: int, largest_window: int) -> tuple[torch.Tensor, int]:
    """Number the blocks of each query's keys.

    Args:
        visible: bool [..., K], the keys of each query: `window` tokens in ascending order, then compressed entries.
        window: number of tokens among the K.
        largest_window: most tokens that a query sees.

    Returns:
        int64 [..., K], -1 for keys that are not visible, and how many blocks there can be.
    """
    tokens, entries = visible[..., :window], visible[..., window:]
    first = -(-tokens.sum(-1, keepdim=True) // BLOCK)
    block = torch.cat([(tokens.cumsum(-1) - 1) // BLOCK, first + (entries.cumsum(-1) - 1) // BLOCK], dim=-1)
    count = -(-min(window, largest_window) // BLOCK) + -(-entries.shape[-1] // BLOCK)
    return block.masked_fill(~visible, -1), count


def attend_with_rounded_weights(
    scores: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scaling: float,
    window: int,
    largest_window: int,
) -> torch.Tensor:
    """Softmax over keys and a sink, times values, with BF16 weights; see the module.

    Differentiable; rounding passes gradients on as they are (straight through), and running maxima have none, since the
    result does not depend on them but for rounding.

    Args:
        scores: float32 [B, H, S, K], products of queries and keys before scaling.
        values: [B, 1 or H, K, D], in BF16 or holding BF16 values.
        visible, window, largest_window: as of `blocks_of_keys`; visible [B or 1, 1, S, K].
        sinks: [H], added to the softmax as the logit of a key without a value.
        scaling: of the scores.

    Returns:
        float32 [B, H, S, D]; zero for a query without keys.
    """
    log2e = math.log2(math.e)
    scale = scaling * log2e
    with torch.no_grad():
        block, count = blocks_of_keys(visible, window, largest_window)
        largest = [scores.masked_fill(block != number, -math.inf).amax(-1) for number in range(count)]
        running = torch.stack(largest, -1).cummax(-1).values * scale
        own = running.gather(-1, block.clamp(min=0).expand(scores.shape))
        end = running[..., -1:]
        end = end.masked_fill(end.isinf(), 0.0)
        shrink = torch.exp2(own - end)
    weights = torch.exp2(torch.add(-own, scores, alpha=scale).masked_fill(~visible, -math.inf))
    rounded = weights + (weights.to(torch.bfloat16).float() - weights).detach()
    sink = torch.exp2((sinks.float().view(1, -1, 1, 1) * log2e - end).clamp(max=LARGEST_POWER))
    total = ((weights * shrink).sum(-1, keepdim=True) + sink).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.matmul(rounded * shrink, values.float()) * (1.0 / total)
