"""What an installation did to a model, module by module: nothing is skipped without a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, tensor_kind

KEPT = {
    "bf16": "the rollout keeps it in BF16",
    "fp32": "the rollout keeps it in float32",
    "integer": "an integer table",
}
"""Why a tensor of each storage kind is not quantized."""


@dataclass
class InstallReport:
    """What was installed on one model.

    Attributes:
        profile: name of the rollout profile.
        wrapped: site -> names of the modules that round there.
        left: site -> why no module rounds there.
        aligned: alignment switch -> what was done for it.
        modules: module that owns tensors -> what happens to them and, for linear layers, to the input.
    """

    profile: str
    wrapped: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    aligned: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def add(self, site: str, module_name: str) -> None:
        """Record that `module_name` rounds at `site`."""
        self.wrapped.setdefault(site, []).append(module_name)

    def summary(self) -> str:
        """One line: seams per site, sites left alone with the reason, alignment switches."""
        done = ", ".join(f"{site} x{len(names)}" for site, names in sorted(self.wrapped.items()))
        left = "; ".join(f"{site}: {why}" for site, why in sorted(self.left.items()))
        text = f"profile {self.profile}: {done or 'nothing rounded'}" + (f" (left: {left})" if left else "")
        aligned = ", ".join(f"{name} {what}" for name, what in self.aligned.items())
        return f"{text}; aligned: {aligned}" if aligned else text

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "profile": self.profile,
            "sites": {site: sorted(names) for site, names in sorted(self.wrapped.items())},
            "left": dict(sorted(self.left.items())),
            "alignment": self.aligned,
            "modules": self.modules,
        }

    def account(self, model: nn.Module) -> None:
        """Fill `modules` with every module of an AutoModel DeepSeek-V4 that owns a parameter or persistent buffer.

        Raises:
            UserError: a tensor the rollout quantizes belongs to a module that neither rounds nor has a reason not to,
                or a tensor that DeepSeek-V4 does not have.
        """
        state = model.state_dict(keep_vars=True)
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            texts = {leaf: self._tensor(name, prefix + leaf, t) for leaf, t in own if prefix + leaf in state}
            if texts:
                same = len(set(texts.values())) == 1
                lines = list(texts.values())[:1] if same else [f"{leaf}: {text}" for leaf, text in texts.items()]
                self.modules[name] = "; ".join([*lines, *self._around(name, module)])

    def _tensor(self, module: str, key: str, tensor: Any) -> str:
        official = AUTOMODEL.official_names(key, tensor.shape[0] if tensor.dim() == 3 else 0)[0]
        kind = tensor_kind(official)
        if kind in KEPT:
            return f"not rounded: {KEPT[kind]}"
        if module in self.wrapped.get(kind, ()):
            return f"rounded as {kind}"
        if kind in self.left:
            return f"not rounded: {self.left[kind]}"
        raise UserError(
            f"{module} holds {official}, which profile {self.profile} rounds as {kind}, but no seam was installed on "
            "it; this package knows the modules of AutoModel 0.7.0"
        )

    def _around(self, name: str, module: nn.Module) -> list[str]:
        """Rounding of inputs, outputs and hidden states of the module, as sites."""
        sites = [site for site, names in self.wrapped.items() if name in names and not site.endswith(".weight")]
        texts = [f"{site} rounded here" for site in sorted(sites)]
        if isinstance(module, nn.Linear) and not any(site.endswith(".input") for site in sites):
            off = self.left.get("o_proj.input" if name.endswith("wo_a") else "linear.input")
            quantized = name in self.wrapped.get("linear.weight", ()) or self._is_quantized(name)
            texts.append(f"input not rounded: {off if quantized and off else KEPT['bf16']}")
        return texts

    @staticmethod
    def _is_quantized(module: str) -> bool:
        return tensor_kind(AUTOMODEL.official_names(f"{module}.weight", 0)[0]) == "linear.weight"
