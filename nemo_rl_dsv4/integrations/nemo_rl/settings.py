"""This package's recipe as NeMo-RL's `MasterConfig`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.routes import RouterMode
from nemo_rl_dsv4.runtime import router_mode

_DATASET_KEYS = ("data_path", "input_key", "output_key", "split", "processor", "download_dir", "split_validation_size")
ABSENT_WHERE_NULL = (
    "policy.generation_batch_size",
    "policy.dtensor_cfg.automodel_kwargs.backend.enable_deepep",
    *(f"data.{split}.{key}" for split in ("train", "validation") for key in _DATASET_KEYS),
    "logger.wandb.entity",
    "cluster.master_port_range_low",
    "cluster.master_port_range_high",
)
"""Keys that NeMo-RL lets a recipe leave out but not set to null."""


def without_nulls(values: dict[str, Any], paths: Iterable[str] = ABSENT_WHERE_NULL) -> dict[str, Any]:
    """The recipe with those of the keys at `paths` left out that are null. Changes `values` and returns it."""
    for path in paths:
        *parents, key = path.split(".")
        section: Any = values
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and section[key] is None:
            del section[key]
    return values


def upstream_settings(config: MasterConfig, *, log_dir: str, checkpoint_dir: str, val_samples: int) -> dict[str, Any]:
    """The recipe as NeMo-RL's loop reads it: its own keys and values, except where the two trainers differ.

    - `cluster.gpus_per_node`: processes of a node on a CPU, for the loop divides throughput by it;
    - `grpo.skip_reference_policy_logprobs_calculation`: true where no KL penalty reads them;
    - `grpo.max_val_samples`, `val_batch_size`: numbers where the recipe has null (all problems);
    - `policy.router_replay.enabled`: where training replays or compares the rollout's experts, for the loop then passes
      them on;
    - `logger.log_dir`, `checkpointing.checkpoint_dir`: the run's own folders.

    Args:
        config: a validated recipe.
        log_dir: the run folder.
        checkpoint_dir: the run's checkpoints.
        val_samples: number of validation problems.
    """
    values = without_nulls(config.model_dump(mode="json", by_alias=True))
    if config.cluster.gpus_per_node == 0:
        values["cluster"]["gpus_per_node"] = config.world_size // config.cluster.num_nodes
    grpo = values["grpo"]
    if config.loss_fn.reference_policy_kl_penalty == 0:
        grpo["skip_reference_policy_logprobs_calculation"] = True
    samples = val_samples if config.grpo.max_val_samples is None else min(config.grpo.max_val_samples, val_samples)
    grpo["max_val_samples"] = samples
    grpo["val_batch_size"] = min(config.grpo.val_batch_size or samples, samples) or 1
    values["policy"]["router_replay"] = {"enabled": router_mode(config) is not RouterMode.OWN}
    values["logger"]["log_dir"] = log_dir
    values["checkpointing"]["checkpoint_dir"] = checkpoint_dir
    return values


def master_config(master_type: Any, values: dict[str, Any]) -> Any:
    """NeMo-RL's `MasterConfig` of these values.

    Raises:
        UserError: it refuses one of them; names the first key.
    """
    from pydantic import ValidationError

    try:
        return master_type(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"NeMo-RL's MasterConfig refuses {key} = {first['input']!r}: {first['msg']}") from error
