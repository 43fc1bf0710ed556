"""Load a checkpoint straight into a model, each rank reading only what it holds.

A parameter sharded by FSDP2 or expert parallelism is a DTensor: its local part decides which rows of which official
tensors are read, by byte range. Pieces of up to 32 MiB are read ahead by a thread, decoded on the parameter's device
and written into it, so a rank needs its own parameters and about 100 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint, check_checkpoint
from nemo_rl_dsv4.model.checkpoint.classes import UNSCALED_FP8
from nemo_rl_dsv4.model.checkpoint.read_ahead import read_ahead
from nemo_rl_dsv4.model.checkpoint.values import decode_tensor, row_pieces
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout, Region
from nemo_rl_dsv4.model.safetensors_file import ShardReader, StoredTensor
from nemo_rl_dsv4.model.stored_weight import is_quantized

OnStored = Callable[[str, torch.Tensor, torch.Tensor | None], None]
"""Sees (official name, codes or values, scale) of every piece as stored, where it is decoded."""


@dataclass(frozen=True)
class LoadReport:
    """What one rank read: official tensors (whole or in part), their bytes in files, seconds, and repeated reads."""

    tensors: int
    bytes: int
    seconds: float
    retries: int
    mtp: str


@dataclass(frozen=True)
class _Piece:
    """Rows of an official tensor on their way into a view of a parameter."""

    tensor: StoredTensor
    scale: StoredTensor | None
    region: Region
    rows: tuple[int, int]
    last: bool

    @property
    def read_rows(self) -> tuple[int, int]:
        """`rows`, widened to whole blocks of 128 where the tensor is quantized."""
        if self.scale is None:
            return self.rows
        return self.rows[0] // 128 * 128, min(-(-self.rows[1] // 128) * 128, self.tensor.shape[0])


def load_into(
    model: torch.nn.Module,
    checkpoint: Path | CheckedCheckpoint,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    layout: Layout = AUTOMODEL,
    unscaled_fp8: Collection[str] = UNSCALED_FP8,
    done: set[str] | None = None,
    on_stored: OnStored | None = None,
    advance: Callable[[int], None] = lambda _: None,
    device: torch.device | None = None,
) -> LoadReport:
    """Fill a built model, sharded or not, from a checkpoint of any public form.

    FP8 and FP4 weights are dequantized into the parameter's dtype, exactly for float32 and bfloat16 when scales are
    powers of two. Not collective: ranks read on their own, and each reads only its experts and rows. `mtp.` tensors are
    left out.

    Args:
        model: parameters and buffers on real devices (see `model.build.materialize` for one built on meta).
        checkpoint: the folder, or what `check_checkpoint` found in it.
        config_overrides: keys that replace those of config.json; only with a folder.
        layout: whose names the model has.
        unscaled_fp8: see `check_checkpoint`; only with a folder.
        done: official names already loaded, which are skipped; names are added as they are finished. A caller that
            keeps the set can continue after an error by calling again.
        on_stored: called with every piece before it is decoded.
        advance: called with the stored bytes of every piece.
        device: where codes are checked and decoded; default where each parameter is. A GPU for parameters that stay in
            host memory.

    Raises:
        UserError: any damage, naming file and tensor; a parameter on meta; names or shapes of model and config that do
            not agree; a file that still cannot be read after several tries.
    """
    started = time.monotonic()
    if not isinstance(checkpoint, CheckedCheckpoint):
        checkpoint = check_checkpoint(checkpoint, config_overrides=config_overrides, unscaled_fp8=unscaled_fp8)
    checkpoint.raise_if_damaged()
    assert checkpoint.config is not None
    done = set() if done is None else done
    pieces = _pieces(model, checkpoint, layout, done)
    names = {piece.tensor.name for piece in pieces}
    with ShardReader() as reader, torch.no_grad():

        def read(piece: _Piece) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not piece.tensor.shape:
                return reader.read(piece.tensor), None
            rows = piece.read_rows
            data = reader.read(piece.tensor, rows)
            if piece.scale is None:
                return data, None
            block = 128 if piece.tensor.dtype == torch.float8_e4m3fn else 1
            return data, reader.read(piece.scale, (rows[0] // block, -(-rows[1] // block)))

        for piece, (data, scale) in read_ahead(pieces, read):
            _write(piece, data, scale, checkpoint, on_stored, device)
            if piece.last:
                done.add(piece.tensor.name)
            advance(data.nbytes)
        return LoadReport(len(names), reader.bytes_read, time.monotonic() - started, reader.retries, checkpoint.mtp)


def _write(
    piece: _Piece,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    checkpoint: CheckedCheckpoint,
    on_stored: OnStored | None,
    device: torch.device | None,
) -> None:
    target, region = piece.region.target, piece.region
    assert checkpoint.config is not None
    where = target.device if device is None else device
    data, scale = data.to(where), None if scale is None else scale.to(where)
    if on_stored is not None:
        on_stored(piece.tensor.name, data, scale)
    values = decode_tensor(
        piece.tensor,
        data,
        scale,
        target.dtype if target.is_floating_point() else torch.float32,
        power_of_two=checkpoint.power_of_two,
        experts=checkpoint.config["n_routed_experts"],
        rows=piece.read_rows if piece.tensor.shape else None,
    )
    if not piece.tensor.shape:
        target.copy_(values)
        return
    first, last = piece.rows
    values = values[first - piece.read_rows[0] : last - piece.read_rows[0]]
    if values.dim() > 1:
        values = values[:, region.cols[0] : region.cols[1]]
    target[first - region.rows[0] : last - region.rows[0]].copy_(values)


def _pieces(model: torch.nn.Module, checkpoint: CheckedCheckpoint, layout: Layout, done: set[str]) -> list[_Piece]:
    """Everything this rank has to read, in export order of the official tensors."""
    assert checkpoint.config is not None
    state = model.state_dict()
    slots = dict(layout.split(state))
    _check_model(slots, checkpoint)
    pieces: list[_Piece] = []
    for name, slot in slots.items():
        if name in done:
            continue
        tensor, shape = checkpoint.weights[name], checkpoint.shapes[name]
        local, offsets = _local_part(slot.key, state[slot.key])
        wanted = layout.stack_shape(shape, slot, checkpoint.config["n_routed_experts"]) if slot.part else shape
        if tuple(state[slot.key].shape) != tuple(wanted):
            raise UserError(
                f"model: {slot.key!r} is {list(state[slot.key].shape)}, but {name!r} makes it {list(wanted)}; build "
                "the model from this checkpoint's config"
            )
        region = layout.region(local, offsets, slot, shape)
        if region is None:
            continue
        parts = row_pieces(tensor, region.rows) if tensor.shape else [(0, 1)]
        if len(parts) == 1 and not is_quantized(tensor.dtype) and not tensor.dtype.is_floating_point:
            parts = [region.rows]  # a table is one piece
        pieces += [_Piece(tensor, checkpoint.scales.get(name), region, rows, rows is parts[-1]) for rows in parts]
    return pieces


def _check_model(slots: Mapping[str, Any], checkpoint: CheckedCheckpoint) -> None:
    missing, extra = set(checkpoint.shapes) - set(slots), set(slots) - set(checkpoint.shapes)
    if missing or extra:
        name = min(missing or extra)
        what = "the model has no place for" if missing else "the checkpoint's config does not ask for"
        raise UserError(
            f"{checkpoint.directory}: {what} {name!r} ({len(missing)} and {len(extra)} tensors differ); build the "
            "model from this checkpoint's config"
        )


def _local_part(key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of a parameter and where it begins in the whole one."""
    local, offsets = tensor, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local = tensor.to_local()
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(shape) != tuple(local.shape):
            raise UserError(f"model: the local part of {key!r} is {list(local.shape)}; its placement says {shape}")
    if local.is_meta:
        raise UserError(f"model: {key!r} is on the meta device; call materialize on the model before loading")
    return local, tuple(offsets)


def total_bytes(model: torch.nn.Module, checkpoint: CheckedCheckpoint, layout: Layout = AUTOMODEL) -> int:
    """Bytes of weights that `load_into` will read for this rank (scales left out), for a progress bar."""
    total = 0
    for piece in _pieces(model, checkpoint, layout, set()):
        rows = piece.read_rows
        total += piece.tensor.bytes * (rows[1] - rows[0]) // max(1, piece.tensor.shape[0] if piece.tensor.shape else 1)
    return total


def iterate_weights(
    checkpoint: CheckedCheckpoint, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield (official name, stored weight, stored scale) one tensor at a time, the next one read ahead.

    Args:
        checkpoint: what `check_checkpoint` found.
        names: which weights, in this order; default all of the policy's in export order.
    """
    chosen = list(checkpoint.shapes if names is None else names)
    with ShardReader() as reader:

        def read(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            scale = checkpoint.scales.get(name)
            return reader.read(checkpoint.weights[name]), None if scale is None else reader.read(scale)

        for name, (data, scale) in read_ahead(chosen, read):
            yield name, data, scale
