"""Keys of NeMo-RL that a recipe may set and that change nothing in the embedded runtime."""

from __future__ import annotations

import difflib
from typing import Any

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.data.hub_problems import HUB_SETS
from nemo_rl_dsv4.model.hf_config import KNOWN_KEYS
from nemo_rl_dsv4.model.known_models import FLASH

UNUSED: dict[str, tuple[Any, ...]] = {
    "checkpointing.save_optimizer": (True,),
    "checkpointing.save_consolidated": (False,),
    "checkpointing.model_save_format": ("safetensors", None),
    "logger.num_val_samples_to_print": (0,),
    "logger.monitor_gpus": (False,),
    "logger.gpu_monitoring.collection_interval": (10.0,),
    "logger.gpu_monitoring.flush_interval": (10.0,),
    "logger.swanlab.project": ("grpo-dsv4",),
    "logger.swanlab.name": ("grpo-dsv4",),
    "logger.tensorboard": ({},),
    "data.num_workers": (0, 1),
    "data.default": (None,),
    "grpo.calculate_advantages_on_gpu": (False,),
    "grpo.malformed_thinking_advantage": (None,),
    "grpo.adv_estimator.minus_baseline": (True,),
    "grpo.async_grpo.max_generation_failures": (0,),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": (False,),
    "policy.generation_batch_size": (None,),
    "policy.dtensor_cfg._v2": (True,),
    "policy.dtensor_cfg.defer_fsdp_grad_sync": (True,),
    "policy.dtensor_cfg.automodel_kwargs.dequantize_base_checkpoint": (True,),
    "policy.dtensor_cfg.automodel_kwargs.backend.enable_hf_state_dict_adapter": (True,),
    "policy.dtensor_cfg.automodel_kwargs.backend.enable_fsdp_optimizations": (False,),
    "policy.generation.port_range_low": (3000,),
    "policy.generation.port_range_high": (4999,),
    "policy.generation.real_quant_export_cpu_offload": (True,),
    "policy.generation.refit_cfg": ({},),
    "policy.generation.mcore_generation_config": ({},),
    "cluster.master_port_range_low": (None,),
    "cluster.master_port_range_high": (None,),
    "cluster.segment_size": (None,),
}
"""Dotted key -> values that ask for nothing."""
_RESOURCES = {f"policy.generation.colocated.resources.{key}": (None,) for key in ("gpus_per_node", "num_nodes")}
UNUSED_WHERE_SHARED: dict[str, tuple[Any, ...]] = _RESOURCES
"""The same for vLLM engines that share the policy's GPUs."""
UNUSED_OF_VLLM: dict[str, tuple[Any, ...]] = {
    "policy.generation.vllm_cfg.use_tqdm": (True,),
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": (False,),
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": (0.5,),
}
"""The same for all vLLM engines."""
UNUSED_OF_REFERENCE: dict[str, tuple[Any, ...]] = {
    "policy.generation.colocated.enabled": (True,),
    **_RESOURCES,
    "policy.generation.vllm_kwargs": ({},),
    "policy.dsv4.vllm_python": (None,),
    "policy.dsv4.refit.direct": (None, False),
}
"""The same for the reference engine, whose processes are on CPUs."""
UNUSED_OF_DATASETS = ("processor", "env_name", "download_dir", "subset", "split", "split_validation_size")
READ_BY_HUB_SETS = ("download_dir", "subset", "split")
"""The same for `data.train` and `data.validation`; null asks for nothing, and so do `math` and a math processor."""
FIXED = {"env_name": ("math",), "processor": ("math_hf_data_processor", "math_data_processor")}


def unused_keys(config: MasterConfig) -> list[str]:
    """One sentence that names the keys set to something that has no effect, or nothing.

    `processor` and `env_name` that name what is done anyway are not mentioned.
    """
    found = []
    generation = config.policy.generation
    of_vllm = UNUSED_OF_VLLM | (UNUSED_WHERE_SHARED if generation.colocated.enabled else {})
    of_engine = of_vllm if generation.backend == "vllm" else UNUSED_OF_REFERENCE
    for key, silent in (UNUSED | of_engine).items():
        value = _value(config, key)
        if value not in silent:
            found.append(f"{key} ({_short(value)})")
    for name, dataset in (("train", config.data.train), ("validation", config.data.validation)):
        if dataset is None:
            continue
        for key in UNUSED_OF_DATASETS:
            value = getattr(dataset, key, None)
            if key in READ_BY_HUB_SETS and dataset.dataset_name in HUB_SETS:
                continue
            if value is not None and value not in FIXED.get(key, ()):
                found.append(f"data.{name}.{key} ({_short(value)})")
    return [f"set in the recipe but without effect in the embedded runtime: {', '.join(found)}"] if found else []


def unknown_overrides(config: MasterConfig) -> list[str]:
    """One sentence for each key of `policy.hf_config_overrides` that no DeepSeek-V4 config.json has."""
    known = sorted({*FLASH, *KNOWN_KEYS})
    notices = []
    for key in config.policy.hf_config_overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            notices.append(
                f"policy.hf_config_overrides.{key} is no key of a DeepSeek-V4 config.json and changes nothing{hint}"
            )
    return notices


def _value(section: Any, key: str) -> Any:
    """The value under a dotted key as YAML has it, such as `policy.dtensor_cfg._v2`."""
    for part in key.split("."):
        fields = type(section).model_fields.items()
        section = getattr(section, next(name for name, info in fields if (info.alias or name) == part))
    return section


def _short(value: Any) -> str:
    return str(value) if isinstance(value, (bool, int, float, str)) else "set"
