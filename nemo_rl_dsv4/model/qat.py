"""Install the rollout's rounding on an unmodified AutoModel DeepSeek-V4, from outside.

| site of the profile | seam |
|---|---|
| `linear.weight`, `linear.input` | wq_a, wq_b, wkv, wo_b, indexer wq_b, shared experts: input and overlaid weight |
| `o_proj.input` | wo_a: inverse RoPE in float32 and rounding in one step, in place of AutoModel's inverse RoPE |
| `expert.weight`, `expert.input` | routed experts: round the input, overlay the stacked weights |
| `expert.hidden` | the activation between the two expert products |
| `linear.input` of a shared expert's down_proj | the same function between its linear layers |
| `kv.swa`, `kv.compressed` | the KV norms: RoPE later touches only the kept channels, so rounding commutes with it |
| `indexer.q`, `indexer.k` | the arguments of the indexer's score function, after RoPE |

Both attention paths (`sdpa`, `tilelang`) read KV after these seams, and all expert paths (`torch`, `torch_mm`, DeepEP,
HybridEP, UCCL-EP dispatch) call the activation function. Gradients are straight-through: the backward pass sees the
unrounded weight and passes activations' gradients unchanged. Weights are rounded once per update: the rounded copy is
kept until the parameter changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.moe.layers import MLP, MoE
from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.alignment import install_alignment
from nemo_rl_dsv4.model.install_report import InstallReport
from nemo_rl_dsv4.model.seams_attention import fuse_inverse_rope, round_kv, round_scores
from nemo_rl_dsv4.model.seams_experts import round_experts, set_hidden, swiglu_limit
from nemo_rl_dsv4.model.seams_linear import Rounded, round_linear
from nemo_rl_dsv4.numerics import QuantSpec
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

Specs = Mapping[str, QuantSpec]


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


def install_fake_quant(model: nn.Module, profile: RolloutProfile, switches: Mapping[str, bool]) -> InstallReport:
    """Make an AutoModel DeepSeek-V4 round where `profile`'s rollout rounds.

    Args:
        model: AutoModel `DeepseekV4ForCausalLM`, on any device, with plain parameters (before parallelization).
        profile: the rollout's numerics.
        switches: which groups of sites to round (`policy.dsv4.fake_quant`).

    Returns:
        The seams that were installed, and every module with what happens to its tensors.

    Raises:
        UserError: the model lacks a site the profile quantizes, a module the rollout quantizes has no seam, a rounding
            order this package does not have, or rounding is already installed.
    """
    specs, left = select_sites(profile, switches)
    _check_steps(profile, specs)
    report = InstallReport(profile.name, left=left)
    for name, module in list(model.named_modules()):
        if isinstance(module, v4_layers.DeepseekV4Attention):
            _install_attention(name, module, specs, profile, report)
        elif isinstance(module, MoE):
            _install_routed_experts(f"{name}.experts", module.experts, specs, profile, report)
        elif isinstance(module, MLP):
            _install_shared_expert(name, module, specs, report)
    _check_complete(model, specs, report)
    report.account(model)
    return report


def install_numerics(
    model: nn.Module,
    profile: RolloutProfile,
    switches: Mapping[str, bool],
    alignment: Mapping[str, bool | None] | None = None,
) -> InstallReport:
    """`install_alignment` and `install_fake_quant` on one model, in the order they need, with one report.

    Args:
        model: AutoModel `DeepseekV4ForCausalLM` before parallelization.
        profile: the rollout's numerics.
        switches: `policy.dsv4.fake_quant`.
        alignment: `policy.dsv4.alignment`; missing and None follow the profile.

    Raises:
        UserError: see the two functions.
    """
    aligned = install_alignment(model, profile, alignment)
    report = install_fake_quant(model, profile, switches)
    report.aligned = aligned
    return report


def _check_steps(profile: RolloutProfile, specs: Specs) -> None:
    """Refuse rounding orders that no seam computes."""
    known = {
        "kv.swa": ("kv_swa_bf16_steps", (("norm", "rope"),)),
        "kv.compressed": ("kv_compressed_bf16_steps", (("nope",),)),
        "indexer.q": ("indexer_q_bf16_steps", (("rope",),)),
        "indexer.k": ("indexer_k_bf16_steps", (("rope",),)),
    }
    for site, (field, wanted) in known.items():
        found = getattr(profile, field)
        if site in specs and found not in wanted:
            raise UserError(f"profile {profile.name} has {field} {found}; the seams compute {wanted[0]}")
    if profile.indexer_hadamard and ("indexer.q" in specs or "indexer.k" in specs):
        raise UserError(
            f"profile {profile.name} transforms indexer queries and keys (Hadamard) before rounding, which the trainer "
            "does not; set policy.dsv4.fake_quant.indexer to false or take a vllm profile"
        )


def _check_complete(model: nn.Module, specs: Specs, report: InstallReport) -> None:
    """Every site of the profile has a module, unless the architecture has no such layer at all."""
    has_indexer = any(isinstance(m, v4_layers.DeepseekV4Indexer) for m in model.modules())
    has_compressor = any(isinstance(m, v4_layers.DeepseekV4Compressor) for m in model.modules())
    for site in specs:
        if site in report.wrapped:
            continue
        if (site.startswith("indexer.") and not has_indexer) or (site == "kv.compressed" and not has_compressor):
            report.left[site] = "no layer of this model has one (all compress_ratios are 0)"
            continue
        raise UserError(f"profile {report.profile} rounds {site}, but this {type(model).__name__} has no such module")


def _install_linear(
    name: str,
    linear: nn.Module,
    specs: Specs,
    report: InstallReport,
    input_site: str = "linear.input",
    *,
    here: bool = True,
) -> None:
    """Round a linear layer's weight and its input; with `here` False the input is rounded by what makes it."""
    weight, inputs = specs.get("linear.weight"), specs.get(input_site)
    if weight is not None:
        report.add("linear.weight", name)
    if inputs is not None and here:
        report.add(input_site, name)
    if weight is not None or (inputs is not None and here):
        round_linear(linear, weight, inputs, here=here)


def _install_attention(
    name: str,
    attention: v4_layers.DeepseekV4Attention,
    specs: Specs,
    profile: RolloutProfile,
    report: InstallReport,
) -> None:
    rope_dim = attention.rope_head_dim
    for child in ("wq_a", "wq_b", "wkv", "wo_b"):
        _install_linear(f"{name}.{child}", getattr(attention, child), specs, report)
    fused = "o_proj.input" in specs and not profile.o_proj_bf16_after_rope
    _install_linear(f"{name}.wo_a", attention.wo_a, specs, report, "o_proj.input", here=not fused)
    if fused:
        fuse_inverse_rope(attention, specs["o_proj.input"])
        report.add("o_proj.input", f"{name}.wo_a")
    if "kv.swa" in specs:
        round_kv(attention.kv_norm, specs["kv.swa"], rope_dim)
        report.add("kv.swa", f"{name}.kv_norm")
    compressor = attention.compressor
    if compressor is None:
        return
    if "kv.compressed" in specs:
        round_kv(compressor.kv_norm, specs["kv.compressed"], rope_dim)
        report.add("kv.compressed", f"{name}.compressor.kv_norm")
    indexer = compressor.indexer
    if indexer is None:
        return
    _install_linear(f"{name}.compressor.indexer.wq_b", indexer.wq_b, specs, report)
    scores = {site: specs[site] for site in ("indexer.q", "indexer.k") if site in specs}
    if scores:
        round_scores(indexer, scores)
        for site in scores:
            report.add(site, f"{name}.compressor.indexer")


def _install_shared_expert(name: str, mlp: MLP, specs: Specs, report: InstallReport) -> None:
    """gate_proj and up_proj round their input; down_proj's is rounded where clamp, SiLU and product make it."""
    for child in ("gate_proj", "up_proj"):
        _install_linear(f"{name}.{child}", getattr(mlp, child), specs, report)
    _install_linear(f"{name}.down_proj", mlp.down_proj, specs, report, here=False)
    if "linear.input" in specs:
        set_hidden(mlp, name, spec=specs["linear.input"])
        report.add("linear.input", f"{name}.down_proj")


def _install_routed_experts(
    name: str, experts: nn.Module, specs: Specs, profile: RolloutProfile, report: InstallReport
) -> None:
    weight, inputs, hidden = (specs.get(f"expert.{part}") for part in ("weight", "input", "hidden"))
    if weight is not None or inputs is not None:
        round_experts(experts, name, weight, inputs)
    if hidden is not None:
        if not experts.config.apply_router_weight_after_down:  # type: ignore[union-attr]
            raise UserError(
                f"{name} applies the routing weight before the down projection, so expert.hidden is not what the "
                "rollout rounds; set policy.dsv4.alignment.routing_weight_after_down to null or true"
            )
        limit = swiglu_limit(experts) if profile.swiglu_clamp else float("inf")
        set_hidden(experts, name, spec=hidden, limit=limit)
    for site in ("expert.weight", "expert.input", "expert.hidden"):
        if site in specs:
            report.add(site, name)


def invalidate_rounded_weights(model: nn.Module) -> None:
    """Make every rounded weight stale; call it after each optimizer step and after loading weights."""
    for module in model.modules():
        if isinstance(module, Rounded):
            for rounding in module._weight_rounding.values():
                rounding.invalidate()
