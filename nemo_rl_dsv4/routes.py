"""The experts that a rollout chose: the tensor `routed_experts` that travels from the engine to the trainer.

Shapes: B sequences, S tokens, L layers (all of them, hash-routed ones included), K experts a token.
`routed_experts[b, i, l]` are the experts that layer l gave to the token at position i. A row of -1 was not recorded:
padding, the last token of a sequence (engines never feed it forward), or a gap in the engine's capture.
The batch carries int16: -1 has no place in an engine's uint8, and int64 would be four times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError

ROUTED_EXPERTS = "routed_experts"
"""Key of the batch."""
MISSING_EXPERT = -1
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RouterMode(Enum):
    """What training does with the experts that the rollout recorded."""

    OWN = "own"
    """It does not get them."""
    COMPARE = "compare"
    """Choose experts itself, and count how often it chose others."""
    REPLAY = "replay"
    """Use them, in training and in logprob passes; where a row is missing, choose itself."""


@dataclass(frozen=True)
class RouterShape:
    """What a model's routers can choose from.

    Attributes:
        layers: L, every layer of the model.
        top_k: K, experts a token visits.
        experts: routed experts in a layer.
        hash_layers: indices of the layers whose experts are looked up by token id.
    """

    layers: int
    top_k: int
    experts: int
    hash_layers: tuple[int, ...] = ()


def pack_routes(requests: Sequence[Tensor | None], lengths: Sequence[int], width: int) -> Tensor:
    """Make the batch tensor from what an engine returns for each request.

    Args:
        requests: for each sequence an integer tensor [tokens - 1, L, K] (vLLM's layout: the last token has no row), or
            None where the engine recorded nothing.
        lengths: tokens of each sequence, prompt and response.
        width: S, columns of the batch.

    Returns:
        int16 [B, width, L, K]; -1 where nothing was recorded.

    Raises:
        UserError: no request was recorded, or one is not of integers that int16 holds, or has another number of rows,
            layers or experts. Whether the model has an expert of that id is for `check_routes`.
    """
    recorded = [routes for routes in requests if routes is not None]
    if not recorded:
        raise UserError(
            f"{ROUTED_EXPERTS}: the engine returned none for all {len(requests)} requests; turn its capture on "
            "(vllm_cfg.enable_return_routed_experts), or router replay and router_overlap_metrics off"
        )
    if recorded[0].ndim != 3:
        raise UserError(f"{ROUTED_EXPERTS} has shape {list(recorded[0].shape)}; wanted [tokens - 1, layers, top-k]")
    layers, top_k = recorded[0].shape[-2:]
    packed = torch.full((len(requests), width, layers, top_k), MISSING_EXPERT, dtype=torch.int16)
    for row, (routes, length) in enumerate(zip(requests, lengths, strict=True)):
        if routes is None:
            continue
        if tuple(routes.shape) != (length - 1, layers, top_k):
            raise UserError(
                f"{ROUTED_EXPERTS} of request {row} has shape {list(routes.shape)}; wanted "
                f"{[length - 1, layers, top_k]} (tokens - 1, layers, top-k) for a sequence of {length} tokens"
            )
        _refuse_ids(routes, row)
        packed[row, : length - 1] = routes.to(torch.int16)
    return packed


def _refuse_ids(routes: Tensor, row: int) -> None:
    """Refuse what int16 would turn into other ids: 65538 into 2, 2.7 into 2, NaN into 0."""
    if routes.dtype not in INTEGER_DTYPES:
        raise UserError(
            f"{ROUTED_EXPERTS} of request {row} is {routes.dtype}; wanted expert ids as one of "
            f"{', '.join(map(str, INTEGER_DTYPES))}"
        )
    highest = torch.iinfo(torch.int16).max
    if routes.numel() and (int(routes.min()) < MISSING_EXPERT or int(routes.max()) > highest):
        ids = routes.long()
        wrong = ids[(ids < MISSING_EXPERT) | (ids > highest)][0]
        raise UserError(
            f"{ROUTED_EXPERTS} of request {row} holds {int(wrong)}; wanted expert ids of 0 to {highest}, or "
            f"{MISSING_EXPERT} for a row that was not recorded: check the engine's capture"
        )


def as_signed(routes: Tensor) -> Tensor:
    """The same ids in a type that can also hold -1 (an engine's uint8 becomes int16)."""
    return routes.to(torch.int16) if routes.dtype == torch.uint8 else routes


def check_routes(routes_BSLK: Tensor, input_ids_BS: Tensor, lengths_B: Tensor, shape: RouterShape) -> None:
    """Refuse routes that cannot be those of this batch in this model. Rows beyond a sequence's length are not read.

    Args:
        routes_BSLK: `routed_experts`.
        input_ids_BS: token ids of the same batch.
        lengths_B: tokens of each sequence.
        shape: of the model that will replay them.

    Raises:
        UserError: another type, shape, number of layers or of experts; a row that is only partly recorded; ids out of
            range; an expert named twice by a router that chooses (a table of zeros, above all); nothing recorded.
    """
    wanted = [*input_ids_BS.shape, shape.layers, shape.top_k]
    if routes_BSLK.dtype not in INTEGER_DTYPES or list(routes_BSLK.shape) != wanted:
        raise UserError(
            f"{ROUTED_EXPERTS} is {routes_BSLK.dtype} {list(routes_BSLK.shape)}; wanted integers of shape {wanted} "
            "(sequences and tokens of input_ids, layers and experts per token of the model)"
        )
    routes = as_signed(routes_BSLK)
    inside = torch.arange(routes.shape[1], device=routes.device) < lengths_B.to(routes.device).unsqueeze(1)
    recorded = (routes != MISSING_EXPERT) & inside[..., None, None]
    if not recorded.any():
        raise UserError(
            f"{ROUTED_EXPERTS}: no row is recorded (all are {MISSING_EXPERT}); the engine captured nothing: turn its "
            "capture on, or router replay off"
        )
    some = recorded.any(-1)
    _refuse(some & ~recorded.all(-1), routes, f"holds {MISSING_EXPERT} beside expert ids; wanted all or none recorded")
    outside = (recorded & ((routes < 0) | (routes >= shape.experts))).any(-1)
    _refuse(outside, routes, f"is out of range; wanted 0 to {shape.experts - 1} (the model's routed experts)")
    if bool((routes[recorded] == 0).all()):
        raise UserError(
            f"{ROUTED_EXPERTS}: every recorded id is 0; the engine returned its table without filling it. Wanted the "
            "experts that each layer chose: check the engine's capture"
        )
    chosen = [layer for layer in range(shape.layers) if layer not in shape.hash_layers]
    ordered = routes[:, :, chosen].sort(dim=-1).values
    repeated = torch.zeros_like(some)
    repeated[:, :, chosen] = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    zeros = "; all zeros mean a layer whose capture was never called"
    _refuse(repeated & some, routes, f"names an expert twice; wanted {shape.top_k} different ids{zeros}")


def _refuse(bad_BSL: Tensor, routes: Tensor, what: str) -> None:
    if bool(bad_BSL.any()):
        row, position, layer = bad_BSL.nonzero()[0].tolist()
        raise UserError(
            f"{ROUTED_EXPERTS} of sequence {row}, position {position}, layer {layer} is "
            f"{routes[row, position, layer].tolist()}, which {what} ({int(bad_BSL.sum())} such rows)"
        )


def same_experts(left_NK: Tensor, right_NK: Tensor) -> Tensor:
    """Whether two choices name the same experts, order ignored: bool [...] from [..., K] each."""
    return (left_NK.sort(dim=-1).values == right_NK.sort(dim=-1).values).all(-1)


def count_overlap(rollout_NK: Tensor, own_NK: Tensor, compare_N: Tensor) -> Tensor:
    """Compare choices of different experts as sets: float64 [3] on their device, without synchronising.

    Args:
        rollout_NK: integer [N, K].
        own_NK: integer [N, K], same device.
        compare_N: bool [N]; rows to compare.

    Returns:
        Sum of |A intersect B| / K, number of rows without a common expert, number of rows compared.
    """
    common = (rollout_NK.unsqueeze(-1) == own_NK.unsqueeze(-2)).any(-1).sum(-1)
    return torch.stack(
        [
            (common * compare_N).sum().double() / rollout_NK.shape[-1],
            ((common == 0) & compare_N).sum().double(),
            compare_N.sum().double(),
        ]
    )


class RouterTally(NamedTuple):
    """Sums over (token, layer) pairs of real tokens, without the last of each sequence, which has no row."""

    shared: float = 0.0
    """Sum of |A intersect B| / K over compared pairs."""
    disjoint: float = 0.0
    """Compared pairs without a common expert."""
    compared: float = 0.0
    """Recorded pairs of layers whose router chooses."""
    expected: float = 0.0
    """All pairs, hash layers included."""
    missing: float = 0.0
    """Of those, pairs without a record."""
    hash_mismatches: float = 0.0
    """Recorded pairs of hash layers that differ from the table."""

    @classmethod
    def total(cls, parts: Sequence[RouterTally]) -> RouterTally:
        """The sum of tallies of several ranks and updates."""
        return cls(*(sum(values) for values in zip(*parts, strict=True)))

    def metrics(self) -> dict[str, float]:
        """`router_overlap` (1 = same experts), `router_no_overlap_share`, `router_missing_share`,
        `router_hash_mismatches`. The first two are absent where nothing was compared, all where nothing was expected.
        """
        if self.expected == 0:
            return {}
        found = {
            "router_missing_share": self.missing / self.expected,
            "router_hash_mismatches": self.hash_mismatches,
        }
        if self.compared > 0:
            found["router_overlap"] = self.shared / self.compared
            found["router_no_overlap_share"] = self.disjoint / self.compared
        return found
