"""Record which experts transformers' DeepSeek-V4 chooses while it decodes.

Shapes: B sequences, t tokens of one forward call, T tokens so far, L layers, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.errors import UserError


class RouteCapture:
    """Hooks on every router of a model; between `start` and `take` each forward call is recorded.

    Args:
        model: transformers `DeepseekV4ForCausalLM`.

    Raises:
        UserError: a layer has no router of a known kind (a transformers version with other names).
    """

    def __init__(self, model: hf.DeepseekV4ForCausalLM) -> None:
        self.layers = int(model.config.num_hidden_layers)
        self._calls: list[list[torch.Tensor]] | None = None
        routers = [m for m in model.modules() if isinstance(m, (hf.DeepseekV4TopKRouter, hf.DeepseekV4HashRouter))]
        if len(routers) != self.layers:
            raise UserError(
                f"{type(model).__name__} has {len(routers)} routers in {self.layers} layers, so its choices cannot be "
                "recorded; the pinned transformers version is 5.18.0"
            )
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int):
        def record(module: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            del module, args
            if self._calls is None:
                return
            if layer == 0:
                self._calls.append([])
            self._calls[-1].append(output[2].to(torch.int16))

        return record

    def start(self) -> None:
        """Record from here on, forgetting what was recorded before."""
        self._calls = []

    def take(self, batch: int) -> torch.Tensor:
        """What was recorded since `start`, int16 [batch, T, L, K], T the tokens fed to the model; stop recording."""
        calls, self._calls = self._calls or [], None
        return torch.cat([torch.stack(call, dim=1).unflatten(0, (batch, -1)) for call in calls], dim=1)
