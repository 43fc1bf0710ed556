"""Seams of the experts: inputs, stacked weights, and what stands between the two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemo_automodel.components.moe.experts import GroupedExperts, GroupedExpertsDeepEP
from nemo_automodel.components.moe.layers import MLP
from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.seam import Seam, attach
from nemo_rl_dsv4.model.seams_linear import Rounded
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec
from nemo_rl_dsv4.numerics.swiglu import swiglu_fake_quant

ACTIVATIONS = {GroupedExperts: "expert_activation_grouped", GroupedExpertsDeepEP: "expert_activation"}
"""Expert classes with seams, and the attribute that holds their activation function."""
AUTOMODEL_STEPS = ("product",)
"""AutoModel computes the hidden state in float32 and rounds it once."""


@dataclass(frozen=True)
class Hidden:
    """How clamp, SiLU and product become the input of the down projection.

    Attributes:
        limit: the model's swiglu_limit, inf for none.
        spec: rounding of the result, None for none.
        steps: after which of "clamp", "silu", "product" a BF16 model rounds to BF16; a float32 model never does.
    """

    limit: float
    spec: QuantSpec | None = None
    steps: tuple[str, ...] = AUTOMODEL_STEPS

    def is_automodel(self, dtype: torch.dtype) -> bool:
        """Whether AutoModel's own function computes this."""
        return self.spec is None and (dtype == torch.float32 or self.steps == AUTOMODEL_STEPS)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., I] gate and up of one dtype to [..., I] in it."""
        steps = () if gate.dtype == torch.float32 else self.steps
        return swiglu_fake_quant(gate, up, self.spec, limit=self.limit, bf16_steps=steps)


class SharedExpert(Seam):
    """AutoModel's MLP with `_hidden` between its own three linear layers."""

    _hidden: Hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to [..., hidden]."""
        if self._hidden.is_automodel(x.dtype):
            return super().forward(x)
        module: Any = self
        return module.down_proj(self._hidden(module.gate_proj(x), module.up_proj(x)))


def expert_class(experts: nn.Module, name: str) -> type:
    """The class in `ACTIVATIONS` that `experts` is.

    Raises:
        UserError: another class (TransformerEngine, Mixture-of-Kittens), whose products offer no place to round.
    """
    for cls in ACTIVATIONS:
        if isinstance(experts, cls):
            return cls
    raise UserError(
        f"{name} is a {type(experts).__name__}, which has no place to round operands; set backend.experts to torch or "
        "torch_mm, and backend.dispatcher to torch, deepep, hybridep or uccl_ep"
    )


def swiglu_limit(module: Any) -> float:
    """The clamp of a routed (`config.swiglu_limit`) or shared (`swiglu_limit`) expert; inf where there is none."""
    holder = module if hasattr(module, "swiglu_limit") else module.config
    return float(getattr(holder, "swiglu_limit", 0.0) or 0.0) or math.inf


def set_hidden(module: Any, name: str, **settings: Any) -> None:
    """Change fields of the `Hidden` of a routed or shared expert, attaching it first if AutoModel's own was there."""
    if not hasattr(module, "_hidden"):
        module._hidden = Hidden(swiglu_limit(module))
        if isinstance(module, MLP):
            attach(module, SharedExpert)
        else:
            attribute = ACTIVATIONS[expert_class(module, name)]
            setattr(module, attribute, _weighted_hidden(module, getattr(module, attribute)))
    holder: Any = module
    holder._hidden = replace(holder._hidden, **settings)


Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _weighted_hidden(experts: Any, own: Activation) -> Activation:
    """The activation function AutoModel's expert classes call: [N, 2I] gate and up, [N, 1] routing weights."""

    def activation(x: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        if experts._hidden.is_automodel(x.dtype):
            return own(x, routing_weights)
        gate, up = x.chunk(2, dim=-1)
        hidden = experts._hidden(gate, up)
        if experts.config.apply_router_weight_after_down and not routing_weights.requires_grad:
            return hidden  # AutoModel passes ones
        return (hidden * routing_weights).to(hidden.dtype)

    return activation


def round_experts(experts: nn.Module, name: str, weight: QuantSpec | None, inputs: QuantSpec | None) -> None:
    """Round a routed expert stack's inputs and weights.

    AutoModel stacks transposed matrices, [E, H, 2I] and [E, I, H], so weight blocks must be square.

    Raises:
        UserError: blocks that are not square, or an expert class without seams.
    """
    expert_class(experts, name)
    if weight is not None and weight.block[0] != weight.block[1]:
        raise UserError(
            f"expert.weight blocks of {weight.block} cannot be rounded on AutoModel's transposed expert stacks; "
            "wanted square blocks"
        )
    roundings = {}
    if weight is not None:
        roundings = {"gate_and_up_projs": WeightRounding(weight, halves=2), "down_projs": WeightRounding(weight)}
    attach(experts, Rounded, _input_rounding=inputs, _operand=inputs, _weight_rounding=roundings)
