"""Counts the bytes of tensors that are alive while operators run, on any device, the meta device included."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """While active, `now` is the size of all storages made since and not freed, `peak` the largest it has been.

    Args:
        existing: tensors made before, whose storages do not count.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()
        for tensor in existing:
            self._known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size
