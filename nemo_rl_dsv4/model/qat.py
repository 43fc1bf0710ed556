"""Install the rollout's rounding on an unmodified AutoModel DeepSeek-V4, from outside.

Every seam is a module whose *class* is swapped for a subclass that rounds and then calls AutoModel's own forward, so
parameter names, state dicts, FSDP and activation checkpointing see the model they know. Nothing of AutoModel's forward
is repeated here.

| site of the profile | seam |
|---|---|
| `linear.weight`, `linear.input` | wq_a, wq_b, wkv, wo_b, indexer wq_b, shared experts: input and overlaid weight |
| `o_proj.input` | wo_a (its input is the attention output after inverse RoPE) |
| `expert.weight`, `expert.input` | routed experts: round the input, overlay the stacked weights |
| `expert.hidden` | the activation between the two expert GEMMs; for shared experts the input of down_proj |
| `kv.swa`, `kv.compressed` | the KV norms: RoPE later touches only the kept channels, so rounding commutes with it |
| `indexer.q`, `indexer.k` | the arguments of the indexer's score function, after RoPE |

Gradients are straight-through: the backward pass sees the unrounded weight and passes activations' gradients unchanged.
Weights are rounded once per update: the rounded copy is kept until the parameter changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.moe.experts import GroupedExperts
from nemo_automodel.components.moe.layers import MLP
from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant
from nemo_rl_dsv4.numerics.profiles import RolloutProfile

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "weights": ("linear.weight", "expert.weight"),
    "linear_inputs": ("linear.input",),
    "o_proj": ("o_proj.input",),
    "experts": ("expert.input", "expert.hidden"),
    "kv": ("kv.swa", "kv.compressed"),
    "indexer": ("indexer.q", "indexer.k"),
}
"""Recipe key under `policy.dsv4.fake_quant` -> the profile sites it turns on."""


@dataclass
class InstallReport:
    """What `install_fake_quant` did: site -> module names that round, and why any site was left alone."""

    profile: str
    wrapped: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, site: str, module_name: str) -> None:
        """Record that `module_name` rounds at `site`."""
        self.wrapped.setdefault(site, []).append(module_name)

    def summary(self) -> str:
        """One line: number of seams per site, then the sites left alone with the reason."""
        done = ", ".join(f"{site} x{len(names)}" for site, names in sorted(self.wrapped.items()))
        left = "; ".join(f"{site}: {why}" for site, why in sorted(self.left.items()))
        return f"profile {self.profile}: {done or 'nothing rounded'}" + (f" (left: {left})" if left else "")


def select_sites(profile: RolloutProfile, switches: Mapping[str, bool]) -> tuple[dict[str, QuantSpec], dict[str, str]]:
    """Choose the sites to round.

    Args:
        profile: the rollout to imitate.
        switches: `policy.dsv4.fake_quant`, one boolean per key of `SWITCHES`.

    Returns:
        site -> spec for every site that is on and that the profile quantizes, and site -> reason for the others.

    Raises:
        UserError: an unknown switch.
    """
    unknown = sorted(set(switches) - set(SWITCHES))
    if unknown:
        raise UserError(f"policy.dsv4.fake_quant has unknown keys {unknown}; wanted some of {sorted(SWITCHES)}")
    specs, left = {}, {}
    for key, sites in SWITCHES.items():
        for site in sites:
            spec = profile.site(site)
            if not switches.get(key, False):
                left[site] = f"fake_quant.{key} is off"
            elif spec is None:
                left[site] = f"{profile.name} does not quantize it"
            else:
                specs[site] = spec
    return specs, left


class _RoundingModule:
    """Mixin put in front of an AutoModel class: round inputs, overlay weights, call the original forward."""

    _input_rounding: QuantSpec | None
    _output_rounding: QuantSpec | None
    _weight_rounding: dict[str, WeightRounding]
    _score_rounding: dict[str, QuantSpec] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._input_rounding is not None:
            args = (fake_quant(args[0], self._input_rounding), *args[1:])
        with _overlay(self, self._weight_rounding), _round_scores(self._score_rounding):
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return out if self._output_rounding is None else fake_quant(out, self._output_rounding)


@contextlib.contextmanager
def _overlay(module: Any, roundings: Mapping[str, WeightRounding]) -> Iterator[None]:
    """Let `module.<name>` return the rounded weight for the duration, leaving the registered parameter in place."""
    for name, rounding in roundings.items():
        module.__dict__[name] = rounding(module._parameters[name])
    try:
        yield
    finally:
        for name in roundings:
            del module.__dict__[name]


_active_score_rounding: dict[str, QuantSpec] | None = None


@contextlib.contextmanager
def _round_scores(specs: dict[str, QuantSpec] | None) -> Iterator[None]:
    global _active_score_rounding
    if specs is None:
        yield
        return
    previous, _active_score_rounding = _active_score_rounding, specs
    try:
        yield
    finally:
        _active_score_rounding = previous


def _wrap_score_function(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dsv4_indexer_scores(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        specs = _active_score_rounding
        if specs is not None:
            q = fake_quant(q, specs["indexer.q"]) if "indexer.q" in specs else q
            k = fake_quant(k, specs["indexer.k"]) if "indexer.k" in specs else k
        return original(q, k, *args, **kwargs)

    dsv4_indexer_scores._rounds_scores = True  # type: ignore[attr-defined]
    return dsv4_indexer_scores


def _swap_class(
    module: nn.Module,
    *,
    input_rounding: QuantSpec | None = None,
    output_rounding: QuantSpec | None = None,
    weight_rounding: dict[str, WeightRounding] | None = None,
    score_rounding: dict[str, QuantSpec] | None = None,
) -> None:
    if isinstance(module, _RoundingModule):
        raise UserError(f"{type(module).__name__} already rounds; install_fake_quant runs once per model")
    cls = type(module)
    module.__class__ = type(f"Rounded{cls.__name__}", (_RoundingModule, cls), {"__module__": cls.__module__})
    module._input_rounding = input_rounding  # type: ignore[assignment]
    module._output_rounding = output_rounding  # type: ignore[assignment]
    module._weight_rounding = weight_rounding or {}  # type: ignore[assignment]
    module._score_rounding = score_rounding  # type: ignore[assignment]


def install_fake_quant(model: nn.Module, profile: RolloutProfile, switches: Mapping[str, bool]) -> InstallReport:
    """Make an AutoModel DeepSeek-V4 round where `profile`'s rollout rounds.

    Args:
        model: AutoModel `DeepseekV4ForCausalLM`, on any device, with plain parameters (before parallelization).
        profile: the rollout's numerics.
        switches: which groups of sites to round (`policy.dsv4.fake_quant`).

    Returns:
        The seams that were installed.

    Raises:
        UserError: the model lacks a site the profile quantizes, or rounding is already installed.
    """
    specs, left = select_sites(profile, switches)
    report = InstallReport(profile.name, left=left)
    rope_dim = int(model.config.qk_rope_head_dim)  # type: ignore[union-attr]
    for name, module in list(model.named_modules()):
        if isinstance(module, v4_layers.DeepseekV4Attention):
            _install_attention(name, module, specs, rope_dim, report)
        elif isinstance(module, MLP):
            _install_shared_expert(name, module, specs, report)
        elif isinstance(module, GroupedExperts):
            _install_routed_experts(name, module, specs, report)
    has_indexer = any(isinstance(m, v4_layers.DeepseekV4Indexer) for m in model.modules())
    has_compressor = any(isinstance(m, v4_layers.DeepseekV4Compressor) for m in model.modules())
    for site in specs:
        if site in report.wrapped:
            continue
        if (site.startswith("indexer.") and not has_indexer) or (site == "kv.compressed" and not has_compressor):
            report.left[site] = "no layer of this model has one (all compress_ratios are 0)"
            continue
        raise UserError(f"profile {profile.name} rounds {site}, but this {type(model).__name__} has no such module")
    return report


def _install_linear(
    name: str, linear: nn.Module, specs: Mapping[str, QuantSpec], report: InstallReport, input_site: str
) -> None:
    weight = specs.get("linear.weight")
    if weight is None and input_site not in specs:
        return
    _swap_class(
        linear,
        input_rounding=specs.get(input_site),
        weight_rounding={"weight": WeightRounding(weight)} if weight is not None else None,
    )
    if weight is not None:
        report.add("linear.weight", name)
    if input_site in specs:
        report.add(input_site, name)


def _install_attention(
    name: str,
    attention: v4_layers.DeepseekV4Attention,
    specs: Mapping[str, QuantSpec],
    rope_dim: int,
    report: InstallReport,
) -> None:
    for child in ("wq_a", "wq_b", "wkv", "wo_b"):
        _install_linear(f"{name}.{child}", getattr(attention, child), specs, report, "linear.input")
    _install_linear(f"{name}.wo_a", attention.wo_a, specs, report, "o_proj.input")
    _install_kv(f"{name}.kv_norm", attention.kv_norm, specs, "kv.swa", rope_dim, report)
    if attention.compressor is None:
        return
    compressor = attention.compressor
    _install_kv(f"{name}.compressor.kv_norm", compressor.kv_norm, specs, "kv.compressed", rope_dim, report)
    indexer = compressor.indexer
    if indexer is None:
        return
    _install_linear(f"{name}.compressor.indexer.wq_b", indexer.wq_b, specs, report, "linear.input")
    scores = {site: specs[site] for site in ("indexer.q", "indexer.k") if site in specs}
    if scores:
        if not getattr(v4_layers.dsv4_indexer_scores, "_rounds_scores", False):
            v4_layers.dsv4_indexer_scores = _wrap_score_function(v4_layers.dsv4_indexer_scores)
        _swap_class(indexer, score_rounding=scores)
        for site in scores:
            report.add(site, f"{name}.compressor.indexer")


def _install_kv(
    name: str, norm: nn.Module, specs: Mapping[str, QuantSpec], site: str, rope_dim: int, report: InstallReport
) -> None:
    if site in specs:
        _swap_class(norm, output_rounding=replace(specs[site], keep_last=rope_dim))
        report.add(site, name)


def _install_shared_expert(name: str, mlp: MLP, specs: Mapping[str, QuantSpec], report: InstallReport) -> None:
    for child, site in (("gate_proj", "linear.input"), ("up_proj", "linear.input"), ("down_proj", "linear.input")):
        linear = getattr(mlp, child)
        if linear is not None:
            _install_linear(f"{name}.{child}", linear, specs, report, site)


def _install_routed_experts(
    name: str, experts: GroupedExperts, specs: Mapping[str, QuantSpec], report: InstallReport
) -> None:
    weight = specs.get("expert.weight")
    if weight is not None and weight.block[0] != weight.block[1]:
        raise UserError(
            f"expert.weight blocks of {weight.block} cannot be rounded on AutoModel's transposed expert stacks; "
            "wanted square blocks"
        )
    weights = {}
    if weight is not None:
        weights = {"gate_and_up_projs": WeightRounding(weight, halves=2), "down_projs": WeightRounding(weight)}
        report.add("expert.weight", name)
    if "expert.input" in specs:
        report.add("expert.input", name)
    if weights or "expert.input" in specs:
        _swap_class(experts, input_rounding=specs.get("expert.input"), weight_rounding=weights)
    if "expert.hidden" in specs:
        if not experts.config.apply_router_weight_after_down:
            raise UserError(
                f"{name} applies the routing weight before the down projection, so expert.hidden is not what the "
                "rollout rounds; build the model with routing_weight_after_down=True"
            )
        rounded = _rounded_activation(experts.expert_activation_grouped, specs["expert.hidden"])
        experts.expert_activation_grouped = rounded  # type: ignore[assignment]
        report.add("expert.hidden", name)


def _rounded_activation(
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], spec: QuantSpec
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def rounded(x: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        return fake_quant(activation(x, routing_weights), spec)

    return rounded


def invalidate_rounded_weights(model: nn.Module) -> None:
    """Make every rounded weight stale; call it after each optimizer step and after loading weights."""
    for module in model.modules():
        if isinstance(module, _RoundingModule):
            for rounding in module._weight_rounding.values():
                rounding.invalidate()
