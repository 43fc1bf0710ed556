"""Bring sharded weights to every rank as codes: many whole experts, one cut expert, or one matrix at a time.

A rank quantizes what it holds before anything is sent, wherever its part cuts no block, so that one byte a weight
travels instead of two or four. Expert stacks may be sharded over experts (expert parallelism) and within each expert
(FSDP of the expert mesh); other tensors over their first dim (FSDP). Memory above the training weights is a piece of
128 MiB of experts (`refit.sharded_run`), or one other tensor. All functions are collective: every rank of the tensor's
mesh calls them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import Layout, Slot
from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.refit.encode import Encoded, Encoder
from nemo_rl_dsv4.refit.expert_layout import ExpertLayout
from nemo_rl_dsv4.refit.expert_run import ExpertRun
from nemo_rl_dsv4.refit.sharded_run import ShardedRun

_ALIGNMENT = 16  # bytes; every tensor in a packed buffer starts at a multiple, so that it can be viewed in its dtype


@dataclass(frozen=True)
class _Axis:
    """One mesh axis a tensor is sharded over: its process group, this rank's index, its size, the tensor's dim."""

    group: dist.ProcessGroup
    index: int
    size: int
    dim: int

    def chunk(self, length: int) -> int:
        """Elements of the sharded dim on each rank but perhaps the last ones."""
        return math.ceil(length / self.size)


def _axes(name: str, tensor: DTensor) -> dict[int, _Axis]:
    """Sharded dim -> axis, mesh axes of one rank left out.

    Raises:
        UserError: a placement other than Replicate and plain Shard, or two axes over one dim.
    """
    axes: dict[int, _Axis] = {}
    mesh = tensor.device_mesh
    for i, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(i) == 1:
            continue
        if type(placement) is not Shard or placement.dim in axes:
            raise UserError(
                f"{name}: cannot export placements {tensor.placements}; wanted each dim sharded over one mesh axis"
            )
        axes[placement.dim] = _Axis(mesh.get_group(i), mesh.get_local_rank(i), mesh.size(i), placement.dim)
    return axes


def gather_matrix(name: str, tensor: DTensor, encoder: Encoder) -> tuple[Encoded, torch.Tensor | None]:
    """Encode a sharded tensor that holds one official tensor.

    Returns:
        The whole encoded tensor, and the whole values where they had to be gathered (else None).
    """
    spec = encoder.spec(name)
    axes = _axes(name, tensor)
    if spec is None or len(axes) != 1 or tensor.ndim != 2:
        value = tensor.full_tensor()
        return encoder.encode(name, value), value
    (axis,) = axes.values()
    length, block = tensor.shape[axis.dim], spec.block[axis.dim]
    chunk = axis.chunk(length)
    if chunk % block or chunk * axis.size != length or (spec.fmt == "e2m1" and axis.dim == 1):
        value = tensor.full_tensor()
        return encoder.encode(name, value), value
    span = slice(axis.index * chunk // block, (axis.index + 1) * chunk // block)
    part = (span, slice(None)) if axis.dim == 0 else (slice(None), span)
    local = encoder.encode(name, tensor.to_local(), part)
    assert local.scale is not None
    return Encoded(_all_gather(local.data, axis, axis.dim), _all_gather(local.scale, axis, axis.dim)), None


def sharded_run(
    layout: ExpertLayout, stacks: Mapping[str, torch.Tensor], model: Layout, encoder: Encoder, spec: QuantSpec
) -> ExpertRun | ShardedRun | None:
    """A layer's experts for bringing many of them at once to every rank.

    Args:
        layout: of all experts.
        stacks: the two stacks by state-dict key, all of them DTensors.
        model: whose stacks they are.
        encoder: what to send.
        spec: how it quantizes them.

    Returns:
        None where experts are cut within themselves, or training's codes are not those of stacks: then
        `gather_expert`. The same on every rank.
    """
    if not all(isinstance(stack, DTensor) for stack in stacks.values()):
        return None
    axes = [_axes(key, stack) for key, stack in stacks.items() if isinstance(stack, DTensor)]
    if axes[0] != axes[1] or set(axes[0]) - {0}:
        return None
    own = {key: stack.to_local() for key, stack in stacks.items() if isinstance(stack, DTensor)}
    axis = axes[0].get(0)
    chunk = layout.experts if axis is None else axis.chunk(layout.experts)
    start = 0 if axis is None else axis.index * chunk
    count, device = len(next(iter(own.values()))), next(iter(own.values())).device
    if count and not encoder.has_whole(f"{layout.stem}.{start}.w1.weight", own, spec):
        return None
    sources = (encoder.stored, encoder.source_scales)
    local = ExpertRun.of(layout, own, model, spec, *sources, start) if count else None
    if axis is None:
        return local
    return ShardedRun(layout, local, device, axis.group, axis.index, chunk)


def gather_expert(members: Sequence[tuple[str, Slot, DTensor]], layout: Layout, encoder: Encoder) -> list[Encoded]:
    """Encode the official tensors of one routed expert, on the ranks that hold it, and hand them to all others.

    Args:
        members: (official name, slot, stack [experts, ...]) of one expert, such as w1, w3, w2.
        layout: how stacks hold experts.
        encoder: what to send.

    Returns:
        One encoded tensor a member.
    """
    axes = _axes(members[0][0], members[0][2])
    expert_axis = axes.get(0)
    expert = members[0][1].expert
    assert expert is not None
    owner, index = 0, expert
    if expert_axis is not None:
        owner, index = divmod(expert, expert_axis.chunk(members[0][2].shape[0]))
    mine = expert_axis is None or expert_axis.index == owner
    encoded = []
    for name, slot, stack in members:
        if mine:
            encoded.append(_encode_own(name, slot, stack, index, layout, encoder))
        else:
            whole = torch.empty(stack.shape[1:], device="meta")
            shape = layout.view(whole.unsqueeze(0), Slot(slot.key, 0, slot.part)).shape
            encoded.append(encoder.empty(name, shape, stack.to_local().device))
    if expert_axis is None:
        return encoded
    return _broadcast(encoded, expert_axis.group, owner, mine)


def _encode_own(name: str, slot: Slot, stack: DTensor, index: int, layout: Layout, encoder: Encoder) -> Encoded:
    local_1XY = stack.to_local()[index].unsqueeze(0)
    here = Slot(slot.key, 0, slot.part)
    inner = [axis for dim, axis in _axes(name, stack).items() if dim > 0]
    if not inner:
        return encoder.encode(name, layout.view(local_1XY, here))
    if len(inner) > 1:
        raise UserError(f"{name}: cannot export placements {stack.placements}; wanted experts cut along one dim")
    (axis,) = inner
    length = stack.shape[axis.dim]
    chunk = axis.chunk(length)
    dim = layout.official_dim(axis.dim)
    spec = encoder.spec(name)
    aligned = spec is not None and spec.fmt != "e2m1" and chunk % spec.block[dim] == 0 and chunk * axis.size == length
    halved = dim == 0 and slot.part != "down"  # gate rows then up rows: a shard holds parts of one of them
    if spec is None or not aligned or halved:
        padded = torch.nn.functional.pad(
            local_1XY.transpose(axis.dim, -1), (0, chunk - local_1XY.shape[axis.dim])
        ).transpose(axis.dim, -1)
        whole = _all_gather(padded, axis, axis.dim).narrow(axis.dim, 0, length)
        return encoder.encode(name, layout.view(whole, here))
    span = slice(axis.index * chunk // spec.block[dim], (axis.index + 1) * chunk // spec.block[dim])
    part = (span, slice(None)) if dim == 0 else (slice(None), span)
    local = encoder.encode(name, layout.view(local_1XY, here), part)
    assert local.scale is not None
    return Encoded(_all_gather(local.data, axis, dim), _all_gather(local.scale, axis, dim))


def _all_gather(local: torch.Tensor, axis: _Axis, dim: int) -> torch.Tensor:
    """Concatenate equal parts of an axis' ranks along `dim`. FP8 travels as bytes, which every backend carries."""
    wire = local.contiguous()
    wire = wire.view(torch.uint8) if wire.element_size() == 1 else wire
    parts = [torch.empty_like(wire) for _ in range(axis.size)]
    dist.all_gather(parts, wire, group=axis.group)
    return torch.cat(parts, dim).view(local.dtype)


def _broadcast(encoded: list[Encoded], group: dist.ProcessGroup, owner: int, mine: bool) -> list[Encoded]:
    """Send the owner's tensors to the group in one byte buffer."""
    tensors = [tensor for pair in encoded for tensor in pair if tensor is not None]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    views = [
        buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        for start, size, tensor in zip(starts, sizes, tensors, strict=False)
    ]
    if mine:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    dist.broadcast(buffer, group=group, group_src=owner)
    received = iter(views)
    return [Encoded(next(received), None if pair.scale is None else next(received)) for pair in encoded]
