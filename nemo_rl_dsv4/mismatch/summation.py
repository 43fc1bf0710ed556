"""What another order of additions does to a trainer: the same products, each off by a last-bit error of its sum.

Two programs that multiply the same matrices add in different orders, and differ by about 1e-7 of the sum's size before
they round it to BF16. Where an FP8 rounding follows, a value near the boundary goes to the next code, 6 % away. How far
that carries depends on the weights, so it is measured on the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nemo_rl_dsv4.numerics.products  # noqa: F401  registers an operator that `_PRODUCTS` names

SUM_ERROR = 1e-7
"""Relative to the root mean square of a product: float32 sums of a thousand terms in different orders."""
_PART = 1 << 24
"""Elements that are moved at a time."""
_HALF = {torch.bfloat16: (2.0**-8, -125), torch.float16: (2.0**-11, -13)}
"""Largest rounding error relative to the power of two at or below a number; frexp's exponent of the smallest normal."""


class OtherSums(TorchDispatchMode):
    """Inside, every matrix product is what another order of additions could have given.

    float32 outputs get a Gaussian error of `size` times their root mean square. A 16-bit output was rounded from a sum
    that is not known any more: a remainder is drawn for it, uniform between its rounding boundaries, and the sum with
    the error is rounded again. At 1e-7 that changes about one BF16 output in a thousand, by its last bit.

    Args:
        size: of the error.
        seed: of the draws.
    """

    def __init__(self, size: float = SUM_ERROR, seed: int = 0) -> None:
        super().__init__()
        self._size, self._seed = size, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return self._moved(out) if func in _PRODUCTS and out.numel() else out

    def _moved(self, out: torch.Tensor) -> torch.Tensor:
        if out.dtype not in (torch.float32, *_HALF):
            return out
        size = self._size * torch.linalg.vector_norm(out, dtype=torch.float32) / math.sqrt(out.numel())
        moved = torch.empty_like(out, memory_format=torch.contiguous_format)
        # In parts: the draws of attention logits would take several times their memory.
        for given, kept in zip(out.reshape(-1).split(_PART), moved.view(-1).split(_PART), strict=True):
            sums, generator = given.float(), self._generator(out.device)
            error = torch.empty_like(sums).normal_(generator=generator).mul_(size)
            if out.dtype in _HALF:
                error += self._remainder(sums, *_HALF[out.dtype])
            kept.copy_(sums + error.masked_fill_(sums == 0, 0.0))  # zeros are sums of zeros
        return moved

    def _remainder(self, sums: torch.Tensor, half: float, smallest: int) -> torch.Tensor:
        """What rounding to these values may have taken away, one draw each."""
        mantissa, exponent = torch.frexp(sums)
        drawn = torch.empty_like(sums).uniform_(-1.0, 1.0, generator=self._generator(sums.device))
        # Below a power of two numbers lie twice as close.
        drawn = torch.where((mantissa.abs() == 0.5) & (drawn * sums < 0), drawn / 2, drawn)
        return torch.ldexp(drawn * (half / 2 * (1 - 1e-3)), exponent.clamp_min(smallest))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.mm.dtype,
    _aten.bmm.dtype,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    torch.ops.nemo_rl_dsv4.tf32_product.default,
}
