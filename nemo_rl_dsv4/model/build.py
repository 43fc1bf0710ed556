"""Build AutoModel's `DeepseekV4ForCausalLM` from an official-style `config.json` dictionary.

The class is built directly: AutoModel's `NeMoAutoModel*` front ends need CUDA, and its own loaders leave the model in a
dtype and placement that a trainer has to undo. Everything here works on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM

from nemo_rl_dsv4.errors import UserError

CPU_BACKEND = {
    "attn": "sdpa",
    "linear": "torch",
    "rms_norm": "torch_fp32",
    "experts": "torch",
    "dispatcher": "torch",
    "rope_fusion": False,
    "gate_precision": "float32",
}
"""The AutoModel backend that runs without a GPU (no TransformerEngine, TileLang or DeepEP)."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(precision: str) -> torch.dtype:
    """Map a recipe's `policy.precision` to a torch dtype; `UserError` names the accepted values."""
    if precision not in _DTYPES:
        raise UserError(f"policy.precision is {precision!r}; wanted one of {sorted(_DTYPES)}")
    return _DTYPES[precision]


def freeze_indexer(model: torch.nn.Module) -> list[str]:
    """Freeze every indexer parameter and return their names.

    Top-k passes no gradient. Under context parallelism an unfrozen indexer would receive zero gradients, which AdamW's
    weight decay still turns into updates.
    """
    frozen = []
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)
            frozen.append(name)
    return frozen


def build_model(
    config: DeepseekV4Config,
    *,
    backend: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    routing_weight_after_down: bool = False,
    seed: int | None = None,
    device: torch.device | None = None,
) -> DeepseekV4ForCausalLM:
    """Build an initialized policy model.

    Args:
        config: AutoModel configuration; `nemo_rl_dsv4.model.checkpoint_format.automodel_config` makes one from an
            official `config.json`.
        backend: AutoModel `BackendConfig` fields; default `CPU_BACKEND`.
        dtype: parameter dtype. Hyper-connections, sinks, router bias and `lm_head` stay float32 either way.
        routing_weight_after_down: multiply by the routing weight after the expert's down projection, as the rollout
            engines do, instead of before it (AutoModel's default).
        seed: seed of the initialization; None leaves the global generator alone.
        device: where to build; default CPU.

    Returns:
        The model in training mode with the indexer frozen.
    """
    device = device or torch.device("cpu")
    config.torch_dtype = dtype
    moe_overrides = {"apply_router_weight_after_down": routing_weight_after_down, "dtype": dtype}
    with device:
        model = DeepseekV4ForCausalLM(
            config, backend=BackendConfig(**dict(backend or CPU_BACKEND)), moe_overrides=moe_overrides
        )
    if seed is None:
        model.initialize_weights(buffer_device=device, dtype=dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.initialize_weights(buffer_device=device, dtype=dtype)
    freeze_indexer(model)
    return model


def materialize(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Give a model that was built on the meta device memory on `device`, in place, sharded or not.

    Parameters and buffers of the state dict are left uninitialized, for `checkpoint.load.load_into` to fill; rotary
    frequencies, which no checkpoint holds, are computed again.

    Raises:
        UserError: another buffer that no checkpoint holds.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model
    model.to_empty(device=device)
    held = set(model.state_dict())
    for path, module in _modules(model):
        for name, _ in module.named_buffers(recurse=False):
            computed = path in _ROTARY and name == "inv_freq"
            if not computed and (f"{path}.{name}" if path else name) not in held:
                raise UserError(f"model: buffer {path}.{name} is in no checkpoint and cannot be computed again")
    compute_rotary_frequencies(model, device)
    return model


_ROTARY = {"model.rotary_emb": False, "model.rotary_emb_compress": True}
"""Path of a rotary embedding -> whether it is the one of compressed layers."""


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules by the path that state dicts know, which has no activation checkpointing."""
    for path, module in model.named_modules():
        yield path.replace("_checkpoint_wrapped_module.", ""), module


def compute_rotary_frequencies(model: torch.nn.Module, device: torch.device) -> None:
    """Compute the rotary embeddings' frequencies on `device`, as an engine on such a device does.

    The powers of a GPU and of a CPU differ in their last bit, and after them the rotary tables and what is rounded.
    """
    from nemo_automodel.components.models.deepseek_v4.layers import DeepseekV4RotaryEmbedding

    config: Any = model.config
    for path, module in _modules(model):
        compressed = _ROTARY.get(path)
        if compressed is None:
            continue
        with device:
            made = DeepseekV4RotaryEmbedding(
                rope_theta=float(config.compress_rope_theta if compressed else config.rope_theta),
                head_dim=int(config.head_dim),
                partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
                # `model.alignment` leaves the engine's scaling of window layers on the module.
                rope_scaling=config.rope_scaling if compressed else getattr(module, "window_scaling", None),
            )
        module.get_buffer("inv_freq").copy_(made.inv_freq)
