"""What our code adds to vLLM's workers. vLLM mixes the class into its own worker class by name."""

from __future__ import annotations

import os
from typing import Any

import torch

from nemo_rl_dsv4.refit.vllm_extension import RefitWorkerExtension


class NumericsWorkerExtension(RefitWorkerExtension):
    """Refits a worker, and lets it say what it computes with. `vllm_config` and `device` are the worker's own."""

    vllm_config: Any
    device: torch.device

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
