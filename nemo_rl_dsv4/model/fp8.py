"""`train_mode: fp8`: modules that QAT made round also multiply in FP8.

Installed after `install_fake_quant`, on the modules where both operands of a product are rounded:

| module | product |
|---|---|
| wq_a, wq_b, wkv, wo_b, indexer wq_b, shared experts | `scaled_linear` in place of `F.linear` |
| wo_a | `scaled_linear` in groups |
| routed experts, `torch` or `torch_mm` or DeepEP | `scaled_grouped_mm` in place of `torch._grouped_mm` |

The output projection's input and hidden states come rounded; quantizing them again gives the values they have, exactly
with power-of-two scales. Everything else keeps the training dtype: router gate, compressors, indexer head weights,
embedding, head, norms, hyper-connections, attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4.layers import DeepseekV4GroupedLinear
from nemo_automodel.components.moe import experts as moe_experts
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.fp8_gemm import fp8_operands, scaled_grouped_mm, scaled_linear, weight_handle, why_emulated
from nemo_rl_dsv4.model.install_report import InstallReport
from nemo_rl_dsv4.model.seam import during, wrap_function
from nemo_rl_dsv4.model.seams_linear import Rounded
from nemo_rl_dsv4.model.weight_rounding import QuantizedWeight, WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec

SITE = "fp8.gemm"
"""Row of the install report that lists the modules multiplying in FP8."""

_STACKS = ("gate_and_up_projs", "down_projs")


def _multiply_linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """One FP8 product instead of rounded operands and a product; an input that comes rounded keeps its values."""
    weight = module._parameters["weight"]
    stored = module._weight_rounding["weight"].quantized(weight)
    return scaled_linear(x, weight, stored, module._operand, groups=getattr(module, "n_groups", 1))


def _multiply_experts(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """AutoModel's forward with another grouped product.

    The stacks are overlaid with handles that only carry gradients; the product finds the codes by the handle.
    """
    codes: dict[int, QuantizedWeight] = {}
    with _overlay_handles(module, x.dtype, codes), during(_active, (codes, module._operand)):
        # Behind `Rounded`, which would overlay rounded weights: AutoModel's own forward.
        behind: Any = super(Rounded, module)
        return behind.forward(x, *args, **kwargs)


@contextmanager
def _overlay_handles(module: Any, dtype: torch.dtype, codes: dict[int, QuantizedWeight]) -> Iterator[None]:
    for name in _STACKS:
        weight = module._parameters[name]
        stored = module._weight_rounding[name].quantized(weight)
        sharded = isinstance(weight, DTensor)
        handle = weight_handle(weight.to_local() if sharded else weight, dtype)
        codes[handle.data_ptr()] = stored
        if sharded:
            handle = DTensor.from_local(handle, weight.device_mesh, weight.placements, run_check=False)
        module.__dict__[name] = handle
    try:
        yield
    finally:
        for name in _STACKS:
            del module.__dict__[name]


_active: ContextVar[tuple[Mapping[int, QuantizedWeight], QuantSpec] | None] = ContextVar("fp8_codes", default=None)


def _grouped_product(x: torch.Tensor, handle: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    active = _active.get()
    assert active is not None
    codes, spec = active
    return scaled_grouped_mm(x, handle, ends, codes[handle.data_ptr()], spec)


def _selection(original: Callable[[bool], Callable[..., torch.Tensor]]) -> Callable[[bool], Any]:
    def select_grouped_mm(use_mxfp8: bool) -> Callable[..., torch.Tensor]:
        return original(use_mxfp8) if _active.get() is None else _grouped_product

    return select_grouped_mm


def install_fp8(model: nn.Module, report: InstallReport) -> None:
    """Make the rounding modules of a model multiply in FP8; adds row `fp8.gemm` to the report.

    Args:
        model: a model that `install_fake_quant` has been run on with weights, linear inputs and experts on.
        report: what it returned.

    Raises:
        UserError: nothing to multiply in FP8, a linear class other than torch's, or a bias.
    """
    reasons: dict[str, int] = {}
    for name, module in model.named_modules():
        roundings: Mapping[str, WeightRounding] = getattr(module, "_weight_rounding", {})
        spec: QuantSpec | None = getattr(module, "_operand", None)
        if not roundings or not all(fp8_operands(spec, rounding.spec) for rounding in roundings.values()):
            continue
        assert spec is not None
        sizes = _install_experts(name, module) if _STACKS[0] in roundings else _install_linear(name, module)
        report.add(SITE, name)
        report.modules[name] = f"{report.modules[name]}; products in FP8"
        reason = why_emulated(_future_device(module), spec, *sizes)
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + 1
    if SITE not in report.wrapped:
        raise UserError(
            f"policy.dsv4.train_mode is fp8, but profile {report.profile} has no product whose operands are both FP8 "
            "in blocks of 1x128 and 128x128; use qat"
        )
    if reasons:
        report.left[SITE] = "emulated with dequantized operands: " + ", ".join(
            f"{count} modules, {reason}" for reason, count in reasons.items()
        )


def _future_device(module: nn.Module) -> torch.device:
    """Where a module computes; one on the meta device will be given memory on this process's GPU, or the CPU."""
    device = next(iter(module.parameters())).device
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _install_linear(name: str, module: Any) -> tuple[int, ...]:
    plain = isinstance(module, nn.Linear)
    if not plain or module.bias is not None:
        raise UserError(
            f"{name} is a {type(module).__name__}{' with a bias' if plain else ''}; FP8 products are for torch's "
            "linear layers without a bias: set policy.dtensor_cfg.automodel_kwargs.backend.linear to torch"
        )
    roundings: Mapping[str, WeightRounding] = getattr(module, "_weight_rounding")  # noqa: B009
    roundings["weight"].keep_values = False
    module._product = _multiply_linear  # type: ignore[assignment]
    groups = module.n_groups if isinstance(module, DeepseekV4GroupedLinear) else 1
    return module.out_features // groups, module.in_features


def _install_experts(name: str, module: Any) -> tuple[int, ...]:
    if module.expert_bias or module.use_mxfp8:
        raise UserError(
            f"{name} has a bias or MXFP8 products, which do not go with train_mode fp8; set experts: torch_mm"
        )
    for rounding in module._weight_rounding.values():
        rounding.keep_values, rounding.transposed = False, True
        rounding.invalidate()
    if hasattr(module, "use_torch_mm"):
        module.use_torch_mm = True  # the loop over experts has no seam; grouped rows give the same products
    wrap_function(moe_experts, "select_grouped_mm", _selection)
    module._product = _multiply_experts
    _, hidden, width = module.gate_and_up_projs.shape
    return hidden, width // 2
