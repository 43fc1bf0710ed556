"""Rules between algorithm, schedule, data and output folders."""

from __future__ import annotations

import difflib
import importlib.util
import tempfile
from pathlib import Path

from pydantic import ValidationError

from nemo_rl_dsv4.config.class_paths import check_class_path, check_schedule_arguments
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY
from nemo_rl_dsv4.config.policy import AdamWKwargs
from nemo_rl_dsv4.config.rules import require
from nemo_rl_dsv4.config.runtime_choice import Runtime
from nemo_rl_dsv4.errors import UserError

ASK_FOR_AN_ANSWER_LINE = ("DAPOMath17K", "DAPOMathAIME2024")
"""Published sets whose prompts say where the answer goes."""


def check_algorithm(config: MasterConfig) -> None:
    """Loss, advantage and checkpoint settings fit together."""
    # The loop's settings check themselves.
    from nemo_rl_dsv4.grpo.settings import TrainerSettings

    TrainerSettings.from_config(config)
    grpo = config.grpo
    require(
        grpo.batch_multiplier == 1 or grpo.use_dynamic_sampling,
        f"grpo.batch_multiplier is {grpo.batch_multiplier} but grpo.use_dynamic_sampling is false; it would have no "
        "effect: set it to 1 or turn dynamic sampling on",
    )
    require(
        grpo.num_generations_per_prompt > 1 or config.loss_fn.positive_example_nll_weight > 0,
        "grpo.num_generations_per_prompt is 1: advantages compare the responses of one prompt, so all would be 0 and "
        "nothing would be learned; set it to 2 or more",
    )
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    require(
        low is None or high is None or low < high,
        f"grpo.advantage_clip_low is {low}, not below grpo.advantage_clip_high = {high}",
    )


def check_async(config: MasterConfig, runtime: Runtime) -> None:
    """Rolling out ahead: the loss knows of the older weights, and the engines are there while the policy trains."""
    ahead, where = config.grpo.async_grpo, "grpo.async_grpo"
    if not ahead.enabled:
        return
    require(
        config.loss_fn.use_importance_sampling_correction,
        f"{where}.enabled is true but loss_fn.use_importance_sampling_correction is false: batches are sampled with "
        "weights that are older than those they train, and only the correction accounts for it; set it to true",
    )
    if runtime == "nemo_rl":
        return
    require(
        not ahead.in_flight_weight_updates,
        f"{where}.in_flight_weight_updates is true; the embedded runtime gives engines weights between batches: set "
        "it to false, or use runtime nemo_rl",
    )
    require(
        not config.policy.dsv4.engine_sleep,
        f"{where}.enabled is true and policy.dsv4.engine_sleep too, but engines that roll out while the policy trains "
        "cannot sleep meanwhile; set one of them to false",
    )


def check_data(config: MasterConfig, runtime: Runtime) -> None:
    """Data sets are named, not empty, large enough, and there where validation needs them."""
    grpo, data = config.grpo, config.data
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        if dataset is None:
            continue
        where = f"data.{name}"
        require(dataset.size != 0, f"{where}.size is 0: an empty dataset; set the number of problems")
        require(
            runtime == "nemo_rl" or dataset.dataset_name is not None,
            f"{where}.dataset_name is null; set it, such as word_problems",
        )
    size = data.train.size
    require(
        size is None or size >= grpo.num_prompts_per_step,
        f"data.train.size is {size}, fewer than grpo.num_prompts_per_step = {grpo.num_prompts_per_step}; one step "
        "needs more problems than there are",
    )
    validates = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
    require(
        data.validation is not None or not validates,
        "data.validation is null but grpo.val_period, val_at_start or val_at_end asks for validation; give a "
        "validation set, or set val_period=0 val_at_start=false val_at_end=false",
    )
    metric = config.checkpointing.metric_name
    require(
        validates or not config.checkpointing.enabled or metric is None or not metric.startswith("val:"),
        f"checkpointing.metric_name is {metric} but validation is off; use a train: metric or null",
    )


def check_scoring(config: MasterConfig, runtime: Runtime) -> None:
    """The verifier reads what the prompts ask for: with the wrong one every reward is 0."""
    if runtime != "embedded":
        return
    key, verifier = "env.math.math_verify_impl", config.env.math.math_verify_impl
    for name, section in (("train", config.data.train), ("validation", config.data.validation)):
        if section is None or section.prompt_file is not None:
            continue
        where = f"data.{name}.dataset_name is {section.dataset_name}"
        require(
            section.dataset_name not in ASK_FOR_AN_ANSWER_LINE or verifier == "dapo_math_verify",
            f"{key} is {verifier}, which scores what is boxed, but {where}, whose prompts ask for a last line "
            f"`Answer: ...`; set {key} to dapo_math_verify, or give data.{name}.prompt_file",
        )
        require(
            section.dataset_name != "word_problems" or verifier == "hf_math_verify",
            f"{key} is {verifier}, which scores a last line `Answer: ...`, but {where}, whose prompts ask for a box; "
            f"set {key} to hf_math_verify",
        )


def check_optimizer(config: MasterConfig) -> None:
    """AdamW's arguments are AdamW's; every optimizer has a learning rate."""
    optimizer, where = config.policy.optimizer, "policy.optimizer.kwargs"
    check_class_path(optimizer.name, "policy.optimizer.name", "torch.optim.AdamW")
    rate = optimizer.kwargs.get("lr")
    require(
        isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0,
        f"{where}.lr is {rate!r}; wanted a number above 0",
    )
    if optimizer.name != "torch.optim.AdamW":
        return
    require(
        not (optimizer.kwargs.get("foreach") and optimizer.kwargs.get("fused")),
        f"{where}.foreach and {where}.fused are both true; torch has one or the other, set one to null",
    )
    known = list(AdamWKwargs.model_fields)
    for key in optimizer.kwargs:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"AdamW takes {', '.join(known)}"
        require(key in known, f"unknown key {where}.{key}; {hint}")
    try:
        AdamWKwargs.model_validate(optimizer.kwargs)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, (where, *first["loc"])))
        raise UserError(f"{path} is {first['input']!r}: {first['msg'].lower()}") from error


def check_scheduler(config: MasterConfig) -> None:
    """The schedule's parts and milestones fit together."""
    steps = config.policy.scheduler
    if steps is None:
        return
    where = "policy.scheduler"
    parts = [step for step in steps if step.milestones is None]
    milestones = [step for step in steps if step.milestones is not None]
    for index, step in enumerate(steps):
        require(
            (step.name is None) != (step.milestones is None),
            f"{where}.{index} must have either a name (with kwargs) or milestones",
        )
        if step.name is not None:
            check_class_path(step.name, f"{where}.{index}.name", "torch.optim.lr_scheduler.LinearLR")
            check_schedule_arguments(step.name, f"{where}.{index}.kwargs", step.kwargs or {})
    require(bool(parts), f"{where} names no schedule; give one, or null for a constant rate")
    if len(parts) == 1 and not milestones:
        return
    require(
        len(milestones) == 1 and steps[-1] is milestones[0],
        f"{where} has {len(parts)} parts; end the list with one item of milestones",
    )
    bounds = milestones[0].milestones or []
    require(
        len(bounds) == len(parts) - 1 and bounds == sorted(set(bounds)),
        f"{where}: milestones are {bounds}; wanted {len(parts) - 1} increasing steps, one between each two of the "
        f"{len(parts)} parts",
    )


def check_outputs(config: MasterConfig) -> None:
    """Folders can be written."""
    check_writable(config.logger.log_dir, "logger.log_dir")
    if config.checkpointing.enabled:
        check_writable(config.checkpointing.checkpoint_dir, "checkpointing.checkpoint_dir")
    if config.policy.dsv4.refit.folder is not None:
        check_writable(config.policy.dsv4.refit.folder, "policy.dsv4.refit.folder")
    tiny = config.policy.dsv4.tiny
    if config.policy.model_name == TINY and tiny is not None:
        check_writable(tiny.cache_dir, "policy.dsv4.tiny.cache_dir")


def missing_trackers(config: MasterConfig) -> list[str]:
    """One sentence for each tracker that is turned on but not installed on this machine."""
    return [
        f"logger.{package}_enabled is true but {package} is not installed; run with `uv run --extra {package}`"
        for package, enabled in (("wandb", config.logger.wandb_enabled), ("mlflow", config.logger.mlflow_enabled))
        if enabled and importlib.util.find_spec(package) is None
    ]


def check_trackers(config: MasterConfig) -> None:
    """The trackers asked for are installed."""
    missing = missing_trackers(config)
    require(not missing, missing[0] if missing else "")


def check_writable(folder: str, key: str) -> None:
    """Raises UserError unless files can be made in `folder`, or in the nearest folder above it that exists."""
    path = Path(folder).expanduser().absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    require(existing.is_dir(), f"{key} is {folder!r}, but {existing} is a file; choose another folder")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"{key} is {folder!r}: cannot write in {existing} ({error.strerror}); choose another"
        ) from error
