"""Train with the experts that the rollout chose, on an unmodified AutoModel DeepSeek-V4, from outside.

Two kinds of router:
- `Gate` (learned): AutoModel passes the top-k it has just selected through its `router_replay` attribute. What sits
  there answers with the rollout's ids; AutoModel then gathers its own unbiased scores at those ids, renormalises and
  scales them, so that the gradient flows through the scores.
- `DeepseekV4HashGate`: looks ids up by token. Nothing has to be replayed; the rollout's rows are compared with its
  table.

AutoModel's own `moe.router_replay.RouterReplay` is not what sits in that attribute: it has no missing rows, its mode is
global to the process (a second model, such as a reference policy, would replay too), and it is switched off when
activation checkpointing recomputes a block in the backward pass, where the recomputed experts would then differ.

State belongs to one forward pass. `RouterReplayer.forward` sets it and takes it away; a checkpointed block keeps a
reference to the state of its own forward and brings it back for its recompute, whatever ran in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4Block, DeepseekV4HashGate
from nemo_automodel.components.moe.layers import Gate
from torch import Tensor, nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.seam import Seam
from nemo_rl_dsv4.routes import (
    MISSING_EXPERT,
    ROUTED_EXPERTS,
    RouterShape,
    RouterTally,
    check_routes,
    count_overlap,
    same_experts,
)

ContextPair = tuple[AbstractContextManager, AbstractContextManager]
ContextFn = Callable[[], ContextPair]


@dataclass(frozen=True)
class _ForwardRoutes:
    """One forward pass: the rollout's ids [T, L, K] on the model's device, which rows to use, whether to count."""

    ids_TLK: Tensor
    recorded_TL: Tensor
    replay: bool
    counts: Tensor
    counting: bool = True


class _GateHandle:
    """Sits in `gate.router_replay`; AutoModel calls `apply` with the selection the gate has made."""

    def __init__(self, layer: int, replays: bool) -> None:
        self.layer, self.replays = layer, replays
        self.current: _ForwardRoutes | None = None

    def apply(self, own_TK: Tensor) -> Tensor:
        """The experts to use, [T, K]: the rollout's where recorded, the gate's own elsewhere."""
        routes = self.current
        if routes is None:
            # Inside a backward pass only a recomputed block runs a gate.
            if self.replays and torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"layer {self.layer} is recomputed in the backward pass without the routes of its forward; "
                    "checkpoint blocks through AutoModel's parallelizer, which calls nemo_checkpoint_context_fn"
                )
            return own_TK
        rollout_TK = routes.ids_TLK[:, self.layer].to(own_TK.dtype)
        if rollout_TK.shape != own_TK.shape:
            raise UserError(
                f"{ROUTED_EXPERTS} for layer {self.layer} has {list(rollout_TK.shape)} rows and ids; the router chose "
                f"{list(own_TK.shape)}: routes must be cut like the tokens of this forward"
            )
        recorded_T = routes.recorded_TL[:, self.layer]
        if routes.counting:
            routes.counts[:3] += count_overlap(rollout_TK, own_TK, recorded_T)
        return torch.where(recorded_T.unsqueeze(-1), rollout_TK, own_TK) if routes.replay else own_TK

    def checkpoint_context(self, inner: Callable[[ContextFn | None], ContextFn | None] | None):
        """The hook AutoModel's activation checkpointing calls for a block: its recompute sees its forward's routes."""

        def hook(context_fn: ContextFn | None) -> ContextFn:
            outer = inner(context_fn) if inner is not None else context_fn

            def contexts() -> ContextPair:
                forward, recompute = outer() if outer is not None else (nullcontext(), nullcontext())
                routes = self.current  # torch asks for contexts when the block's forward begins
                bound = None if routes is None else replace(routes, counting=False)
                return forward, self._bind(bound, recompute)

            return contexts

        return hook

    @contextmanager
    def _bind(self, routes: _ForwardRoutes | None, recompute: AbstractContextManager) -> Iterator[None]:
        previous, self.current = self.current, routes
        try:
            with recompute:
                yield
        finally:
            self.current = previous


class RouterReplayer:
    """Gives one model's routers the rollout's experts, or only counts how far they agree.

    Install it after the weights are loaded and before the model is parallelized; once per model.

    Args:
        model: AutoModel `DeepseekV4ForCausalLM`.
        replay: use the rollout's experts; False leaves every choice to the model and counts the agreement.

    Raises:
        UserError: a layer has a router that cannot be replayed, or replay is installed already.
    """

    def __init__(self, model: nn.Module, *, replay: bool) -> None:
        self.replay = replay
        self._handles: list[_GateHandle] = []
        self._tables: dict[int, DeepseekV4HashGate] = {}
        gates = [(name, block) for name, block in model.named_modules() if isinstance(block, DeepseekV4Block)]
        gates = [(name, block) for name, block in gates if ".mtp." not in f".{name}."]
        if not gates:
            raise UserError(f"{type(model).__name__} has no DeepSeek-V4 layer; router replay needs one")
        for layer, (name, block) in enumerate(gates):
            self._install(layer, name, block)
        first: Any = gates[0][1].mlp.gate
        self.shape = RouterShape(len(gates), int(first.topk), int(first.n_experts), tuple(self._tables))
        self._counts: list[Tensor] = []

    def _install(self, layer: int, name: str, block: DeepseekV4Block) -> None:
        gate: Any = block.mlp.gate
        if isinstance(gate, DeepseekV4HashGate):
            self._tables[layer] = gate
            return
        # A seam (float32 logits and weights) runs the gate's own forward, where the handle below answers.
        own = next(cls for cls in type(gate).__mro__ if not issubclass(cls, Seam))
        if not isinstance(gate, Gate) or own.forward is not Gate.forward:
            raise UserError(
                f"{name}.mlp.gate is a {type(gate).__name__}; router replay knows Gate and DeepseekV4HashGate only "
                "(switch backend.fake_balanced_gate off)"
            )
        if gate.router_replay is not None:
            raise UserError(f"{name}.mlp.gate replays already ({type(gate.router_replay).__name__}); install it once")
        handle = _GateHandle(layer, self.replay)
        gate.router_replay = handle  # type: ignore[assignment]
        inner = getattr(block, "nemo_checkpoint_context_fn", None)
        block.nemo_checkpoint_context_fn = handle.checkpoint_context(inner)  # type: ignore[assignment]
        self._handles.append(handle)

    def check(self, data: Mapping[str, Tensor]) -> None:
        """Look at a whole batch before any of it is used.

        Args:
            data: `routed_experts` integer [B, S, L, K], `input_ids` [B, S], `input_lengths` [B].

        Raises:
            UserError: no `routed_experts`; what `check_routes` refuses; with replay, a hash layer whose rows differ
                from the model's table (tokens or tables of rollout and trainer differ: nothing could be trusted).
        """
        if ROUTED_EXPERTS not in data:
            raise UserError(
                f"the batch has no {ROUTED_EXPERTS}, which policy.dsv4.router_replay and router_overlap_metrics need; "
                "turn on the rollout engine's capture"
            )
        routes, ids, lengths = data[ROUTED_EXPERTS], data["input_ids"], data["input_lengths"]
        check_routes(routes, ids, lengths, self.shape)
        if not self.replay:
            return
        inside_BS = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        for layer in self._tables:
            wrong_BS = self._hash_mismatch(layer, routes[:, :, layer], ids, inside_BS).cpu()
            if bool(wrong_BS.any()):
                row, position = wrong_BS.nonzero()[0].tolist()
                token = int(ids[row, position])
                raise UserError(
                    f"{ROUTED_EXPERTS} of sequence {row}, position {position}, hash layer {layer} is "
                    f"{routes[row, position, layer].tolist()}; the model's table gives token {token} the experts "
                    f"{self._table(layer)[token].tolist()} ({int(wrong_BS.sum())} such rows). Rollout and "
                    "trainer hold different tables or tokens, or the engine does not capture its hash layers"
                )

    def _table(self, layer: int) -> Tensor:
        """`tid2eid` [vocabulary, K] as it is now: weights may be loaded after the installation."""
        table = self._tables[layer].tid2eid
        assert isinstance(table, Tensor)
        return table

    def _hash_mismatch(self, layer: int, routes_NK: Tensor, ids_N: Tensor, use_N: Tensor) -> Tensor:
        table = self._table(layer)
        routes = routes_NK.to(table.device, table.dtype)
        recorded = (routes != MISSING_EXPERT).all(-1) & use_N.to(table.device)
        return recorded & ~same_experts(routes, table[ids_N.to(table.device)])

    @contextmanager
    def forward(self, routes_bsLK: Tensor, input_ids_bs: Tensor, expected_bs: Tensor) -> Iterator[None]:
        """Replay (or count) in the model call made inside.

        Args:
            routes_bsLK: signed integers [b, s, L, K], laid out like the tokens of the call: padded, packed, or this
                rank's slice under context parallelism.
            input_ids_bs: the tokens of the call, [b, s], on the model's device.
            expected_bs: bool [b, s]; True where a row is expected: real tokens but the last of each sequence. All
                other positions are routed by the model itself.

        Raises:
            UserError: routes of another shape than the tokens (`check` finds everything else).
        """
        wanted = [*input_ids_bs.shape, self.shape.layers, self.shape.top_k]
        if list(routes_bsLK.shape) != wanted or expected_bs.shape != input_ids_bs.shape:
            raise UserError(
                f"{ROUTED_EXPERTS} of a micro-batch has shape {list(routes_bsLK.shape)} and its mask "
                f"{list(expected_bs.shape)}; wanted {wanted} and {list(input_ids_bs.shape)}, laid out like the tokens"
            )
        device = input_ids_bs.device
        routes, expected = routes_bsLK.to(device), expected_bs.to(device)
        if any(handle.current is not None for handle in self._handles):
            raise RuntimeError("a forward with routes is running already; leave it before starting another")
        ids_TLK, expected_T = routes.flatten(0, 1), expected.flatten()
        recorded_TL = (ids_TLK != MISSING_EXPERT).all(-1) & expected_T.unsqueeze(-1)
        counts = torch.zeros(len(RouterTally._fields), dtype=torch.float64, device=device)
        counts[3] = expected_T.sum() * self.shape.layers
        counts[4] = counts[3] - recorded_TL.sum()
        for layer in self._tables:
            counts[5] += self._hash_mismatch(layer, routes[:, :, layer], input_ids_bs, expected).sum()
        current = _ForwardRoutes(ids_TLK, recorded_TL, self.replay, counts)
        for handle in self._handles:
            handle.current = current
        try:
            yield
        finally:
            for handle in self._handles:
                handle.current = None
        self._counts.append(counts)

    def take_tally(self) -> RouterTally:
        """The counts of all forwards finished since the last call, and start again."""
        counts, self._counts = self._counts, []
        return RouterTally(*torch.stack(counts).sum(0).tolist()) if counts else RouterTally()
