"""What our code adds to vLLM's workers. vLLM mixes the class into its own worker class by name."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.transport.shared import gpu_name
from nemo_rl_dsv4.refit.vllm_extension import RefitWorkerExtension


class NumericsWorkerExtension(RefitWorkerExtension):
    """Refits a worker, and lets it say what it computes with. `vllm_config` and `device` are the worker's own."""

    vllm_config: Any
    device: torch.device
    model_runner: Any
    _dsv4_hooks: list[Any]
    _dsv4_layers: list[list[torch.Tensor]]

    def describe_numerics(self) -> dict[str, Any]:
        """KV cache dtype, logprobs mode, the environment variables that choose kernels, and the GPU."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "kv_cache_dtype": self.vllm_config.cache_config.cache_dtype,
            "logprobs_mode": str(self.vllm_config.model_config.logprobs_mode),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
            "capability": [properties.major, properties.minor],
            "architecture": getattr(properties, "gcnArchName", "") if torch.version.hip else "",
        }

    def dsv4_gpu_name(self) -> str:
        """What every process of this host calls this worker's GPU."""
        return gpu_name(self.device)

    def dsv4_capture_start(self) -> None:
        """Keep what every layer hands on, from now until `dsv4_capture_stop`.

        A layer of vLLM returns its feed-forward part, the residual streams and how the two mix; the next layer mixes
        them in its first kernel. The same kernel makes the mixed streams here.
        """
        layers = list(self.model_runner.get_model().model.layers)
        mix = importlib.import_module(type(layers[0]).__module__).mhc_post_tilelang
        self._dsv4_layers = [[] for _ in layers]

        def keep(number: int) -> Any:
            def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
                if not (isinstance(output, tuple) and len(output) == 4):
                    raise UserError(
                        f"layer {number} of this vLLM returns {type(output).__name__}; wanted the four parts of "
                        "hyper-connections, so its hidden states cannot be compared"
                    )
                self._dsv4_layers[number].append(mix(*output).detach().float().cpu())

            return hook

        self._dsv4_hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(layers)]

    def dsv4_capture_stop(self) -> list[torch.Tensor]:
        """What was kept since: one float32 tensor [tokens, streams, hidden] a layer."""
        for handle in self._dsv4_hooks:
            handle.remove()
        kept, self._dsv4_layers, self._dsv4_hooks = self._dsv4_layers, [], []
        return [torch.cat(parts) for parts in kept if parts]
