"""Training weights to rollout weights: official names, codes and scales as a checkpoint would hold them.

An engine computes with the same values as QAT's fake quantization in training: both round with the spec of the same
profile site. Blocks are those of one official tensor: w1 and w3 of an expert, stacked side by side in training, are
rounded apart, and experts never share a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import chain, groupby

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout, Slot
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.numerics import RolloutProfile, get_profile
from nemo_rl_dsv4.refit.encode import Encoded, Encoder
from nemo_rl_dsv4.refit.expert_run import ExpertRun, layout_of, raise_first_damaged
from nemo_rl_dsv4.refit.placement import views
from nemo_rl_dsv4.refit.sharded import gather_expert, gather_matrix, sharded_run
from nemo_rl_dsv4.refit.sharded_run import ShardedRun

Run = ExpertRun | ShardedRun
"""Experts of a layer that are written into buckets many at once."""

Members = tuple[tuple[str, Slot], ...]
"""Official names and their places in a model."""

GROUP_BYTES = 128 << 20
"""Codes of routed experts that are made together: large enough to fill a GPU, small beside a bucket."""


def export_weights(
    state_dict: Mapping[str, torch.Tensor],
    profile: str | RolloutProfile,
    *,
    unquantized: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
    layout: Layout = AUTOMODEL,
    source_scales: Mapping[str, torch.Tensor] | None = None,
    stored: Mapping[str, StoredCodes] | None = None,
) -> ExportedWeights:
    """Yield (official name, tensor) for every weight, one at a time, in export order.

    A quantized weight [out, in] comes as codes (float8_e4m3fn [out, in]; FP4 int8 [out, in/2]) and then at once its
    scale `<module>.scale`, the raw grid [ceil(out/rows), ceil(in/cols)]. Fused partners are neighbours. Every other
    tensor keeps the dtype class of a release: float32 for hyper-connections, sinks, position tables and router bias,
    int64 for hash tables, `unquantized` for the rest.

    Sharded weights (DTensors) reach every rank as codes, see `refit.sharded`: every rank must iterate to the end, and
    an error is raised on all of them. Memory above the training weights is a few experts (`GROUP_BYTES`) or one tensor.

    Args:
        state_dict: `DeepseekV4ForCausalLM.state_dict()`, buffers included.
        profile: a rollout profile or its name; decides format, block and scale rule of `linear.weight` and
            `expert.weight`. fnuz profiles get the checkpoint's e4m3fn codes, which their engines reinterpret.
        unquantized: dtype of tensors that a release stores in BF16, and of weights the profile does not quantize.
            float32 leaves a float32 policy's values as they are.
        scale_dtype: float32 values, or E8M0 bytes as uint8 or float8_e8m0fnu (power-of-two scales only).
        layout: whose names and stacks `state_dict` has.
        source_scales: scales of the checkpoint the weights came from (`SourceScales`). Blocks that training has not
            changed are then sent with the checkpoint's own bytes; without them, with its values.
        stored: codes and scales that training already computes with, on the rank that holds them (`stored_codes`).
            They are sent as they are and nothing is quantized again; only a block whose values `source_scales` holds as
            well goes with the checkpoint's bytes.

    Raises:
        UserError: a name that is not the layout's; a NaN or infinite element (tensor and index or block named); an
            all-zero hash table; a `scale_dtype` that cannot hold the profile's scales; a sharding that cannot be read;
            stored codes in another format than the profile's.
    """
    profile = get_profile(profile) if isinstance(profile, str) else profile
    return ExportedWeights(
        state_dict, Encoder(profile, unquantized, scale_dtype, source_scales or {}, stored or {}), layout
    )


def export_tensor(
    name: str,
    value: torch.Tensor,
    profile: RolloutProfile,
    unquantized: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
    source_scale: torch.Tensor | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one official tensor (any strides) as `export_weights` does: one item, or codes and scale."""
    encoder = Encoder(profile, unquantized, scale_dtype, {} if source_scale is None else {name: source_scale})
    yield from encoder.items(name, encoder.encode(name, value), value)


class ExportedWeights:
    """What `export_weights` returns: an iterator over (official name, tensor), or over pieces that fill buckets.

    It can be walked once, by either. Whoever walks on after a consumer has stopped gets what that one left over: ranks
    that hold other shards take part in all of it. After an error of the export itself nothing is left.
    """

    def __init__(self, state_dict: Mapping[str, torch.Tensor], encoder: Encoder, layout: Layout) -> None:
        self._state, self._encoder, self._layout = state_dict, encoder, layout
        self._over = False
        self._walk = self._pieces()
        self._items = self._all_items()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._items)

    def pieces(self) -> Iterator[Run | Iterator[tuple[str, torch.Tensor]]]:
        """Runs of experts that can be quantized in place, and the items of everything between, in export order."""
        return self._walk

    def _pieces(self) -> Iterator[Run | Iterator[tuple[str, torch.Tensor]]]:
        sizes = tuple((key, len(tensor) if tensor.dim() == 3 else 0) for key, tensor in self._state.items())
        groups = ((self._run(members), members) for members in _groups(self._layout, sizes))
        for in_place, part in groupby(groups, key=lambda group: group[0] is not None):
            if in_place:
                for run, _ in part:
                    assert run is not None
                    yield run
                    if isinstance(run, ShardedRun):
                        if run.broken:
                            return
                        run.take_part()
                continue
            items = self._noted(chain.from_iterable(self._items_of(members) for _, members in part))
            yield items
            for _ in items:
                pass
            if self._over:
                return

    def _noted(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from items
        except Exception:
            self._over = True
            raise

    def _all_items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self._walk:
            yield from (items_of_run(piece) if isinstance(piece, Run) else piece)

    def _run(self, members: Members) -> Run | None:
        (name, slot), encoder, model = members[0], self._encoder, self._layout
        spec = None if slot.expert is None else encoder.spec(name)
        if spec is None or encoder.scale_dtype != torch.float32:
            return None
        stacks = {key: self._state[key] for key in dict.fromkeys(slot.key for _, slot in members)}
        layout = layout_of(name.rsplit(".", 3)[0], stacks, model, spec)
        if layout is None:
            return None
        if not any(isinstance(stack, DTensor) for stack in stacks.values()):
            whole = encoder.has_whole(name, stacks, spec)
            sources = (encoder.stored, encoder.source_scales)
            return ExpertRun.of(layout, stacks, model, spec, *sources) if whole else None
        return sharded_run(layout, stacks, model, encoder, spec)

    def _items_of(self, group: Members) -> Iterator[tuple[str, torch.Tensor]]:
        layout, encoder = self._layout, self._encoder
        members = [(name, slot, self._state[slot.key]) for name, slot in group]
        sharded = [isinstance(tensor, DTensor) for _, _, tensor in members]
        if members[0][1].expert is not None and not any(sharded):
            yield from _experts(members, layout, encoder)
            return
        if members[0][1].expert is not None and all(sharded):
            for _, expert in groupby(members, key=lambda member: member[1].expert):
                yield from _sharded_expert(list(expert), layout, encoder)  # type: ignore[arg-type]
            return
        for name, slot, tensor in members:
            if not isinstance(tensor, DTensor):
                value = layout.view(tensor, slot)
                yield from encoder.items(name, encoder.encode(name, value), value)
            elif slot.expert is None:
                encoded, value = gather_matrix(name, tensor, encoder)
                yield from encoder.items(name, encoded, value)
            else:
                yield from _sharded_expert([(name, slot, tensor)], layout, encoder)


@functools.lru_cache(maxsize=4)
def _groups(layout: Layout, sizes: tuple[tuple[str, int], ...]) -> tuple[Members, ...]:
    """Official names and slots of (state-dict key, experts), the routed experts of a layer together.

    Kept from refit to refit: a large model has tens of thousands of names.
    """
    return tuple(tuple(run) for _, run in groupby(layout.split_keys(sizes), key=_expert_of))


def _expert_of(item: tuple[str, Slot]) -> tuple[str, bool]:
    """Key of a run of neighbours: all routed experts of a layer, or a tensor alone."""
    name, slot = item
    return (name, False) if slot.expert is None else (name.partition(".ffn.")[0], True)


def items_of_run(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize a run in memory of its own, as many experts at once as fit into `GROUP_BYTES`."""
    damaged, first, room = torch.zeros(1, dtype=torch.int32, device=run.device), 0, GROUP_BYTES
    while not run.fits(room):
        room *= 2
    while first < len(run):
        count = run.piece(first, room)
        buffer = torch.empty(sum(run.layout.sections(count)), dtype=torch.uint8, device=run.device)
        placed = run.encode(first, count, buffer, 0, damaged)
        if isinstance(run, ExpertRun) and bool(damaged):
            raise_first_damaged([(run, first, count)])
        yield from zip((placement.name for placement in placed), views(buffer, placed), strict=True)
        first += count


def _experts(
    members: list[tuple[str, Slot, torch.Tensor]], layout: Layout, encoder: Encoder
) -> Iterator[tuple[str, torch.Tensor]]:
    """Encode the routed experts of a layer, as many at once as fit into `GROUP_BYTES` of codes."""
    weights = sum(member[2][0].numel() for member in {member[1].key: member for member in members}.values())
    together = max(1, GROUP_BYTES // weights)
    experts = [list(run) for _, run in groupby(members, key=lambda member: member[1].expert)]
    for start in range(0, len(experts), together):
        group = experts[start : start + together]
        encoded: dict[str, Encoded] = {}
        for position in range(len(group[0])):
            names = [expert[position][0] for expert in group]
            _, slot, stack = group[0][position]
            values = layout.view_experts(stack, slot, len(group))
            encoded.update(zip(names, encoder.encode_stack(names, values), strict=True))
        for name, _, _ in (member for expert in group for member in expert):
            yield from encoder.items(name, encoded.pop(name), checked=encoder.checks_stack(name))


def _sharded_expert(
    members: list[tuple[str, Slot, DTensor]], layout: Layout, encoder: Encoder
) -> Iterator[tuple[str, torch.Tensor]]:
    for (name, _, _), encoded in zip(members, gather_expert(members, layout, encoder), strict=True):
        yield from encoder.items(name, encoded)
