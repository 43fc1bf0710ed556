"""Agreement of the experts the rollout chose with those the training forward chose.

Shapes: N any leading dims (batch, sequence), L layers, K experts a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MISSING_EXPERT = -1


class RouterOverlap(NamedTuple):
    """Sums over (token, layer) pairs; add those of micro-batches and ranks with :meth:`plus`."""

    shared: float
    """Sum of |A intersect B| / K."""
    disjoint: float
    """Number of pairs without a common expert."""
    pairs: float
    """Number of pairs compared."""

    def plus(self, other: "RouterOverlap") -> "RouterOverlap":
        return RouterOverlap(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """`router_overlap` (1 = same experts) and `router_no_overlap_share`; empty when nothing was compared."""
        if self.pairs == 0:
            return {}
        return {"router_overlap": self.shared / self.pairs, "router_no_overlap_share": self.disjoint / self.pairs}


def router_overlap(rollout_NLK: Tensor, train_NLK: Tensor, mask_N: Tensor) -> RouterOverlap:
    """Compare two expert choices as sets, order ignored.

    Args:
        rollout_NLK: expert ids of the rollout, integer [..., L, K]; -1 = not recorded.
        train_NLK: expert ids of the training forward, same shape.
        mask_N: tokens to compare, [...] (nonzero = compare).

    Pairs with a -1 on either side are left out.

    Raises:
        ValueError: the shapes differ, or a recorded choice names an expert twice (a capture that was never filled).
    """
    if rollout_NLK.shape != train_NLK.shape or rollout_NLK.shape[:-2] != mask_N.shape:
        raise ValueError(
            f"router_overlap: rollout experts {tuple(rollout_NLK.shape)} and training experts "
            f"{tuple(train_NLK.shape)} must have one shape [..., layers, top-k] whose leading dims are those of "
            f"mask {tuple(mask_N.shape)}"
        )
    rollout, train = rollout_NLK.to(torch.int64), train_NLK.to(torch.int64)
    for side, experts in (("rollout", rollout), ("training", train)):
        ordered = experts.sort(dim=-1).values
        repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != MISSING_EXPERT)
        if repeated.any():
            where = repeated.nonzero()[0].tolist()[:-1]
            raise ValueError(
                f"router_overlap: {side} experts at {where} are {experts[tuple(where)].tolist()}; wanted distinct ids"
            )
    recorded = ((rollout != MISSING_EXPERT) & (train != MISSING_EXPERT)).all(dim=-1)
    compared = recorded & (mask_N > 0).unsqueeze(-1)
    common = (rollout.unsqueeze(-1) == train.unsqueeze(-2)).any(dim=-1).sum(dim=-1)[compared]
    top_k = rollout.shape[-1]
    return RouterOverlap(
        shared=float(common.sum()) / top_k, disjoint=float((common == 0).sum()), pairs=float(common.numel())
    )
