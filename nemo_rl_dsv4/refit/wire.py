"""Exported weights as plain bytes, for transports that cannot carry FP8 tensors (pickle among them)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from nemo_rl_dsv4.errors import UserError


class WireTensor(NamedTuple):
    """One tensor of a stream: official name, torch dtype name without `torch.`, shape, raw bytes as uint8 [nbytes]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: np.ndarray


class Shipment(NamedTuple):
    """All tensors of one refit, and the sender's checksum over them."""

    tensors: list[WireTensor]
    checksum: str


def to_wire(stream: Iterable[tuple[str, torch.Tensor]]) -> list[WireTensor]:
    """Copy every tensor of a stream into bytes."""
    wire = []
    for name, tensor in stream:
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().copy()
        wire.append(WireTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
    return wire


def from_wire(wire: Iterable[WireTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors again. Nothing is shared with the payload.

    Raises:
        UserError: a dtype torch does not know, or a payload whose length does not fit dtype and shape.
    """
    for item in wire:
        dtype = getattr(torch, item.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"refit: tensor {item.name!r} has dtype {item.dtype!r}, which torch does not know")
        wanted = int(np.prod(item.shape, dtype=np.int64)) * dtype.itemsize
        if item.payload.nbytes != wanted:
            raise UserError(
                f"refit: tensor {item.name!r} carries {item.payload.nbytes} bytes; "
                f"{item.dtype} {list(item.shape)} needs {wanted}"
            )
        raw = torch.from_numpy(np.array(item.payload, dtype=np.uint8, copy=True))
        yield item.name, raw.view(dtype).reshape(item.shape)
