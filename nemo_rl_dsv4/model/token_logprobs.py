"""Log-probabilities of given tokens from hidden states, without the [tokens, vocabulary] float32 logits.

Shapes: B sequences, S tokens, N = B * S, H hidden, V vocabulary. With V = 129,280 the float32 logits of 8,192 tokens
are 4.2 GB, and their softmax and gradient as much again. Here at most `chunk_size` positions have logits at a time, in
the forward and in the backward pass, which computes them anew.

The seam: AutoModel's model calls `compute_lm_head_logits(lm_head, hidden_states, ...)`. While `scoring` is active that
call returns log-probabilities instead of logits. The product still runs inside `lm_head`'s own forward, so FSDP's hooks
have its weight whole there and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4 import model as v4_model
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass(frozen=True)
class HeadNumerics:
    """Precision of the head's product and of the logits it leaves.

    Attributes:
        product: dtype of both operands.
        logits: dtype that logits are rounded to before the float32 softmax; None for the dtype of the hidden states.
    """

    product: torch.dtype = torch.float32
    logits: torch.dtype | None = None


AUTOMODEL_HEAD = HeadNumerics()
"""AutoModel's: a float32 product whose result is rounded to the activations' dtype."""
BF16_HEAD = HeadNumerics(torch.bfloat16, torch.bfloat16)
"""vLLM's: a BF16 product with BF16 logits."""


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target under a float32 softmax: logits [..., V], int64 [...] -> float32 [...]."""
    logits = logits.float()
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, numerics: HeadNumerics = AUTOMODEL_HEAD) -> torch.Tensor:
    """Logits [..., V] of hidden states [..., H] under the head's weight [V, H], in `numerics.logits`."""
    product = nn.functional.linear(hidden.to(numerics.product), weight.to(numerics.product))
    return product.to(numerics.logits or hidden.dtype)


def chunked_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_size: int,
    numerics: HeadNumerics = AUTOMODEL_HEAD,
) -> torch.Tensor:
    """`token_logprobs(head_logits(hidden, weight), targets)` with the logits of `chunk_size` positions at a time.

    Args:
        hidden: [..., H], any float dtype.
        weight: the head, [V, H].
        targets: int64 [...], within 0..V - 1.
        chunk_size: positions whose logits exist at once; 1 or more.
        numerics: precision of product and logits.

    Returns:
        float32 [...], differentiable with respect to `hidden` and `weight`; the weight's gradient is accumulated over
        chunks in float32.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs = _ChunkedLogprobs.apply(flat, weight, targets.reshape(-1), chunk_size, numerics)
    return logprobs.view(targets.shape)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        chunk_size: int,
        numerics: HeadNumerics,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N)
        ctx.chunk_size, ctx.numerics = chunk_size, numerics
        cast_VH = weight_VH.to(numerics.product)
        parts = zip(hidden_NH.split(chunk_size), targets_N.split(chunk_size), strict=True)
        return torch.cat([token_logprobs(head_logits(h, cast_VH, numerics), t) for h, t in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N = ctx.saved_tensors
        numerics: HeadNumerics = ctx.numerics
        cast_VH = weight_VH.to(numerics.product)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(targets_N), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            hidden, grad_N1 = hidden_NH[part], grads[0][part].unsqueeze(-1)
            logits = head_logits(hidden, cast_VH, numerics)
            # d log p(target) / d logits = onehot(target) - softmax(logits), rounded as the logits were.
            grad_logits = logits.float().softmax(-1).mul_(-grad_N1)
            grad_logits.scatter_add_(-1, targets_N[part].unsqueeze(-1), grad_N1)
            grad_logits = grad_logits.to(logits.dtype).to(numerics.product)
            del logits
            if grad_hidden is not None:
                grad_hidden[part] = (grad_logits @ cast_VH).to(hidden.dtype)
            if grad_weight is not None and numerics.product == torch.float32:
                grad_weight.addmm_(grad_logits.t(), hidden.float())
            elif grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden.to(numerics.product)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype), None, None, None


class ScoringHead(nn.Module):
    """Mixin put in front of the class of `lm_head`: called with targets it returns their log-probabilities."""

    weight: torch.Tensor
    chunk_size: int | None
    numerics: HeadNumerics
    targets: torch.Tensor | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return super().forward(hidden)
        # A BF16 head belongs to BF16 activations; a float32 model keeps every bit.
        numerics = AUTOMODEL_HEAD if hidden.dtype == torch.float32 else self.numerics
        if self.chunk_size is None:
            return token_logprobs(head_logits(hidden, self.weight, numerics), self.targets)
        return chunked_token_logprobs(hidden, self.weight, self.targets, chunk_size=self.chunk_size, numerics=numerics)


def install_scoring_head(
    model: nn.Module, *, chunk_size: int | None, numerics: HeadNumerics = AUTOMODEL_HEAD
) -> ScoringHead:
    """Let `model` return log-probabilities under `scoring`. Call it before sharding.

    Args:
        model: AutoModel's `DeepseekV4ForCausalLM`.
        chunk_size: positions whose logits exist at once; None for all.
        numerics: precision of the head.

    Returns:
        The head; its `chunk_size` and `numerics` may be changed between passes.
    """
    head: Any = model.lm_head
    if not isinstance(head, ScoringHead):
        cls = type(head)
        head.__class__ = type(f"Scoring{cls.__name__}", (ScoringHead, cls), {"__module__": cls.__module__})
    head.chunk_size, head.numerics, head.targets = chunk_size, numerics, None
    _patch_automodel()
    return head


@contextmanager
def scoring(model: nn.Module, targets: torch.Tensor) -> Iterator[None]:
    """Within, `model(...).logits` is float32 [B, S], log-probabilities of `targets` (int64 [B, S])."""
    head: Any = model.lm_head
    head.targets = targets
    try:
        yield
    finally:
        head.targets = None


def _patch_automodel() -> None:
    original: Callable[..., Any] = v4_model.compute_lm_head_logits
    if getattr(original, "_scores_tokens", False):
        return

    def compute_lm_head_logits(lm_head: nn.Module | None, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        if isinstance(lm_head, ScoringHead) and lm_head.targets is not None:
            return CausalLMOutputWithPast(logits=lm_head(hidden_states))  # type: ignore[arg-type]
        return original(lm_head, hidden_states, *args, **kwargs)

    compute_lm_head_logits._scores_tokens = True  # type: ignore[attr-defined]
    v4_model.compute_lm_head_logits = compute_lm_head_logits  # type: ignore[assignment]
