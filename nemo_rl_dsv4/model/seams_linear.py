"""Seams of `linear.weight` and `linear.input`: a linear layer with rounded operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_rl_dsv4.model.seam import Seam, attach, engine_dtype, overlaid
from nemo_rl_dsv4.model.weight_rounding import WeightRounding, _RoundedOnce
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.products import bf16_linear, on_tensor_cores


class Rounded(Seam):
    """Rounds the first argument and overlays the weights, or computes the products in another way.

    Attributes:
        _input_rounding: how the first argument is rounded here; None if it is not, or was before it came.
        _operand: format of the first argument as the product takes it, wherever it was rounded.
        _weight_rounding: parameter name -> rounding.
        _product: called with the module and its arguments in place of the module's own forward on rounded operands.
    """

    _input_rounding: QuantSpec | None
    _operand: QuantSpec | None
    _weight_rounding: dict[str, WeightRounding]
    _product: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward on rounded operands, or `_product`."""
        if self._product is not None:
            return self._product(self, *args, **kwargs)
        if self._input_rounding is not None:
            args = (fake_quant(args[0], self._input_rounding), *args[1:])
        with overlaid(self, self._weight_rounding):
            return super().forward(*args, **kwargs)


class CastsInput(Seam):
    """A linear layer that takes its input in the weight's dtype: an exact cast back after a caller went to float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] in any float dtype to [..., out] in the weight's."""
        return super().forward(x.to(self.weight.dtype))  # type: ignore[attr-defined]


class EngineWeight(Seam):
    """A linear layer that AutoModel keeps in float32 and the engine stores in BF16, where activations are BF16.

    Operands with BF16 values and a float32 sum are what a BF16 product computes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] float32 to [..., out] float32; the gradient reaches the float32 weight unrounded."""
        module: Any = self
        dtype = engine_dtype.get()
        if dtype is None or dtype == torch.float32:
            return super().forward(x)
        weight = module.weight
        rounded = _RoundedOnce.apply(weight, weight.detach().to(dtype).to(weight.dtype))
        if dtype == torch.bfloat16 and weight.dtype == torch.float32 and on_tensor_cores(x):
            return bf16_linear(x, rounded, module.bias)
        module.__dict__["weight"] = rounded
        try:
            return super().forward(x)
        finally:
            del module.__dict__["weight"]


def round_linear(linear: nn.Module, weight: QuantSpec | None, inputs: QuantSpec | None, *, here: bool = True) -> None:
    """Attach `Rounded` to one linear layer; either spec may be None. With `here` False its input comes rounded."""
    roundings = {"weight": WeightRounding(weight)} if weight is not None else {}
    attach(linear, Rounded, _input_rounding=inputs if here else None, _operand=inputs, _weight_rounding=roundings)
