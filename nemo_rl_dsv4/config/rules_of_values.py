"""Values that fit the schema and nothing else: too large to mean anything, or names that nothing reports."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.metric_names import TRAIN_METRICS, validation_metrics
from nemo_rl_dsv4.config.rules import require

LARGEST_SEED = 2**32 - 1
"""numpy takes no larger one."""
LARGEST_NUMBER = 100_000
"""Of word problems."""
PROCESSES_PER_CORE = 8
FEWEST_PROCESSES_ALLOWED = 64
EXPERT_DTYPES = ("fp4", "fp8")
QUANT_METHODS = ("fp8",)


def check_values(config: MasterConfig) -> None:
    """Seeds, numbers of processes, stop strings, ranges of ports and the tiny model's widths are ones that can work."""
    seeds: dict[str, int | None] = {"grpo.seed": config.grpo.seed, "data.train.seed": config.data.train.seed}
    if config.data.validation is not None:
        seeds["data.validation.seed"] = config.data.validation.seed
    tiny = config.policy.dsv4.tiny
    if tiny is not None:
        seeds["policy.dsv4.tiny.seed"] = tiny.seed
    for key, seed in seeds.items():
        require(seed is None or seed <= LARGEST_SEED, f"{key} is {seed}; wanted at most {LARGEST_SEED} (32 bits)")
    for name, dataset in (("train", config.data.train), ("validation", config.data.validation)):
        largest = None if dataset is None else dataset.max_number
        require(
            largest is None or largest <= LARGEST_NUMBER,
            f"data.{name}.max_number is {largest}; wanted at most {LARGEST_NUMBER}: the tiny tokenizer has a token for "
            "each number",
        )
    limit = max(FEWEST_PROCESSES_ALLOWED, PROCESSES_PER_CORE * (os.cpu_count() or 1))
    for key, number in {
        "policy.generation.reference_cfg.num_workers": config.policy.generation.reference_cfg.num_workers,
        "policy.generation.reference_cfg.num_threads": config.policy.generation.reference_cfg.num_threads,
        "policy.dsv4.cpu_processes": config.policy.dsv4.cpu_processes,
        "env.math.num_workers": config.env.math.num_workers,
        "data.num_workers": config.data.num_workers,
    }.items():
        require(
            number <= limit, f"{key} is {number}; this machine has {os.cpu_count()} cores, wanted at most {limit} here"
        )
    for text in config.policy.generation.stop_strings or []:
        require(
            bool(text.strip()) or "\n" in text,
            f"policy.generation.stop_strings holds {text!r}, at which every response ends at once; remove it",
        )
    for section, prefix in (
        (config.policy.generation, "policy.generation.port_range_"),
        (config.cluster, "cluster.master_port_range_"),
    ):
        low, high = (getattr(section, prefix.rpartition(".")[2] + end) for end in ("low", "high"))
        require(
            low is None or high is None or low <= high,
            f"{prefix}low is {low}, above {prefix}high = {high}; exchange them",
        )
    if config.policy.model_name == "tiny" and tiny is not None:
        for name in ("hidden_size", "moe_intermediate_size"):
            width = getattr(tiny, name)
            require(
                width % 32 == 0,
                f"policy.dsv4.tiny.{name} is {width}; wanted a multiple of 32, the group of an FP4 expert weight",
            )


def check_stop_tokens(config: MasterConfig, vocabulary: int, whose: str) -> None:
    """Stop tokens are tokens.

    Args:
        vocabulary: number of tokens.
        whose: what says so, for the message.
    """
    for token in config.policy.generation.stop_token_ids or []:
        require(
            token < vocabulary,
            f"policy.generation.stop_token_ids holds {token}, which no response can have: {whose} has {vocabulary} "
            f"tokens, wanted at most {vocabulary - 1}; remove it",
        )


def check_metric_names(config: MasterConfig) -> None:
    """Metrics that rank checkpoints or end the run are ones that this run reports."""
    validation = validation_metrics(config.grpo.val_num_generations_per_prompt)
    name = config.grpo.stop_at_validation_metric
    if name is not None:
        _require_known("grpo.stop_at_validation_metric", name, name, validation)
        validates = config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end
        require(validates, f"grpo.stop_at_validation_metric is {name!r} but validation is off; set grpo.val_period")
    ranked = config.checkpointing.metric_name
    if ranked is None or not config.checkpointing.enabled or ":" not in ranked:
        return
    kind, metric = ranked.split(":", 1)
    _require_known("checkpointing.metric_name", ranked, metric, validation if kind == "val" else TRAIN_METRICS)


def check_stored_formats(values: Mapping[str, Any], where: str) -> None:
    """The formats that a checkpoint's config.json names are ones that can be read.

    Args:
        values: config.json, overrides included.
        where: the file, for the message.
    """
    expert = values.get("expert_dtype")
    require(
        expert is None or expert in EXPERT_DTYPES,
        f"{where}: expert_dtype is {expert!r}; wanted {' or '.join(EXPERT_DTYPES)}, or none",
    )
    quantization = values.get("quantization_config")
    if quantization is None:
        return
    require(
        isinstance(quantization, Mapping),
        f"{where}: quantization_config is {type(quantization).__name__}; wanted a mapping",
    )
    method = quantization.get("quant_method")
    require(
        method in QUANT_METHODS,
        f"{where}: quantization_config.quant_method is {method!r}; wanted {' or '.join(QUANT_METHODS)}",
    )


def _require_known(key: str, found: str, metric: str, known: tuple[str, ...]) -> None:
    near = difflib.get_close_matches(metric, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    require(metric in known, f"{key} is {found!r}, which no step reports; {hint}valid: {', '.join(known)}")
