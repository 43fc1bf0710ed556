"""Distances between rollout and training probabilities of the same tokens, with confidence intervals over prompts.

Shapes: N sequences, T response tokens (padded). r rollout logprobs, t training logprobs. Tokens of one prompt are not
independent, so intervals resample prompts, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.metrics import prob_difference, rollout_train_k1, rollout_train_k3

RESAMPLES, LEVEL = 1000, 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its confidence interval over prompts (percentile bootstrap)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3e} [{self.low:.1e}, {self.high:.1e}]"


@dataclass(frozen=True)
class Mismatch:
    """Distances of one comparison.

    Attributes:
        k1: mean(r - t); estimates KL(rollout || training), can be negative.
        k3: mean(exp(t - r) - 1 - (t - r)); the same, never negative.
        prob_diff: mean |e^t - e^r|.
        largest: largest |r - t| of any token.
        tokens: how many tokens.
        prompts: how many prompts.
    """

    k1: Estimate
    k3: Estimate
    prob_diff: Estimate
    largest: float
    tokens: int
    prompts: int

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        return asdict(self)


def compare(rollout_NT: Tensor, training_NT: Tensor, mask_NT: Tensor, prompt_N: Tensor, *, seed: int = 0) -> Mismatch:
    """Distances over all masked tokens.

    Args:
        rollout_NT: r, float [N, T].
        training_NT: t, float [N, T].
        mask_NT: which tokens count, bool or 0/1 [N, T].
        prompt_N: prompt of each sequence, int64 [N].
        seed: of the resampling.

    Raises:
        UserError: shapes that differ, no token at all, or a logprob that counts and is NaN, infinite or positive.
    """
    if not rollout_NT.shape == training_NT.shape == mask_NT.shape or prompt_N.shape != mask_NT.shape[:1]:
        raise UserError(
            f"mismatch: rollout {list(rollout_NT.shape)}, training {list(training_NT.shape)}, mask "
            f"{list(mask_NT.shape)}, prompts {list(prompt_N.shape)} differ; wanted [N, T] three times and [N]"
        )
    mask = mask_NT.bool()
    if not bool(mask.any()):
        raise UserError("mismatch: no token counts; the rollout has no response")
    for name, values in (("rollout", rollout_NT), ("training", training_NT)):
        wrong = mask & ~(values.isfinite() & (values <= 1e-4))
        if bool(wrong.any()):
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise UserError(
                f"mismatch: {name} logprob of token {column} of sequence {row} is {float(values[row, column])}; "
                "wanted a finite number of at most 0"
            )
    r = torch.where(mask, rollout_NT.double(), 0.0)
    t = torch.where(mask, training_NT.double(), 0.0)
    _, group_N = prompt_N.unique(return_inverse=True)
    groups = int(group_N.max()) + 1
    counts = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_N, mask.sum(1).double())
    draws = torch.randint(groups, (RESAMPLES, groups), generator=torch.Generator().manual_seed(seed))

    def estimate(formula: Callable[[Tensor, Tensor], Tensor]) -> Estimate:
        per_sequence = torch.where(mask, formula(t, r), 0.0).sum(1)
        sums = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_N, per_sequence)
        resampled = sums[draws].sum(1) / counts[draws].sum(1).clamp_min(1.0)
        tail = (1 - LEVEL) / 2
        low, high = torch.quantile(resampled, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return Estimate(float(sums.sum() / counts.sum()), low, high)

    return Mismatch(
        k1=estimate(rollout_train_k1),
        k3=estimate(rollout_train_k3),
        prob_diff=estimate(prob_difference),
        largest=float((r - t).abs().max()),
        tokens=int(mask.sum()),
        prompts=groups,
    )


def by_position(rollout_NT: Tensor, training_NT: Tensor, mask_NT: Tensor, *, bins: int = 8) -> list[dict[str, float]]:
    """k3 and probability difference over the position in the response: does the distance grow along it?

    Returns:
        one dict a bin: `first`, `last` (token positions), `tokens`, `k3`, `prob_diff`; none for a bin without tokens.
    """
    mask = mask_NT.bool()
    length = int(mask.any(0).nonzero().max()) + 1
    edges = torch.linspace(0, length, min(bins, length) + 1).round().long().tolist()
    rows = []
    for first, end in pairwise(edges):
        chosen = mask[:, first:end]
        if not bool(chosen.any()):
            continue
        r, t = rollout_NT[:, first:end][chosen].double(), training_NT[:, first:end][chosen].double()
        rows.append(
            {
                "first": first,
                "last": end - 1,
                "tokens": int(chosen.sum()),
                "k3": float(rollout_train_k3(t, r).mean()),
                "prob_diff": float(prob_difference(t, r).mean()),
            }
        )
    return rows


def worst_tokens(
    ids_NS: Tensor,
    start_N: Tensor,
    mask_NS: Tensor,
    *,
    rollout: Tensor,
    trainer: Tensor,
    prefill: Tensor | None = None,
    count: int = 10,
) -> list[dict[str, float]]:
    """The tokens whose logprobs are farthest apart, farthest first.

    Args:
        ids_NS: token ids.
        start_N: where each response begins, so the prompt's length.
        mask_NS: which tokens count.
        rollout, trainer: logprobs, float [N, S].
        prefill: the engine's own prefill of the same tokens, float [N, S].
        count: how many at most; tokens that agree exactly are never among them.

    Returns:
        one dict a token: `sequence`, `prompt_tokens`, `position` in the response, `token`, `rollout`, `trainer` and
        `prefill` logprobs, and the token's part `k3` of the sum over all tokens.
    """
    distance = torch.where(mask_NS.bool(), (rollout - trainer).abs(), 0.0)
    values, places = distance.flatten().topk(min(count, distance.numel()))
    found = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        if value == 0.0:
            break
        row, column = divmod(place, ids_NS.shape[1])
        r, t = rollout[row, column].double(), trainer[row, column].double()
        found.append(
            {
                "sequence": row,
                "prompt_tokens": int(start_N[row]),
                "position": column - int(start_N[row]),
                "token": int(ids_NS[row, column]),
                "rollout": float(r),
                "trainer": float(t),
                "k3": float(rollout_train_k3(t, r)),
            }
        )
        if prefill is not None:
            found[-1]["prefill"] = float(prefill[row, column])
    return found
