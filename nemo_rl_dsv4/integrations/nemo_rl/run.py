"""One run under NeMo-RL's `grpo_train`.

Reads top to bottom: the tree, the data, the processes, NeMo-RL's parts, the loop.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nemo_rl_dsv4.cluster import ray_cluster
from nemo_rl_dsv4.config import MasterConfig, validate
from nemo_rl_dsv4.config.prompts import make_prompts, make_tokenizer, steps_of_run
from nemo_rl_dsv4.config.runs_here import not_implemented
from nemo_rl_dsv4.data import Tokenizer
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpoint_files import read_checkpoint
from nemo_rl_dsv4.grpo.settings import TrainerSettings
from nemo_rl_dsv4.integrations.nemo_rl import data as nemo_data
from nemo_rl_dsv4.integrations.nemo_rl.generation import LOOP_HOOKS, EngineGeneration, Refit, RolloutClock
from nemo_rl_dsv4.integrations.nemo_rl.interfaces import adapted, require_mentions, require_parameters
from nemo_rl_dsv4.integrations.nemo_rl.metrics import NO_TRACKERS, MetricsFile
from nemo_rl_dsv4.integrations.nemo_rl.patches import (
    ENVIRONMENT_NAME,
    import_nemo_rl,
    registrations,
    worker_environment,
)
from nemo_rl_dsv4.integrations.nemo_rl.policy import BESIDE_INTERFACE, GroupPolicy
from nemo_rl_dsv4.integrations.nemo_rl.settings import master_config, upstream_settings
from nemo_rl_dsv4.integrations.nemo_rl.tree import require_tree, revision, symbol
from nemo_rl_dsv4.model.checkpoint.serving import export_command, training_notes
from nemo_rl_dsv4.runtime import (
    INSTALL_FILE,
    check_classes,
    note_changes,
    refuse_used_checkpoints,
    start_parts,
    warn_of_biased_sampling,
)
from nemo_rl_dsv4.utils.console import make_console, print_summary
from nemo_rl_dsv4.utils.metrics_file import read_steps
from nemo_rl_dsv4.utils.progress import progress
from nemo_rl_dsv4.utils.run_folder import checkpoint_folder, recorded_config
from nemo_rl_dsv4.utils.run_logger import RunLogger
from nemo_rl_dsv4.utils.run_summary import summary_lines, whole_run_summary

LOOP_ARGUMENTS = (
    "policy",
    "policy_generation",
    "wrapped_dataloader",
    "val_dataloader",
    "tokenizer",
    "loss_fn",
    "task_to_env",
    "val_task_to_env",
    "logger",
    "checkpointer",
    "grpo_save_state",
    "master_config",
)


class LoopTokenizer:
    """What NeMo-RL's loop and rollout ask of a tokenizer, in its names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id, self.eos_token_id = tokenizer.pad_id, tokenizer.eos_id

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False) -> list[str]:
        """The text of each row of ids (tensors or lists)."""
        return [self._tokenizer.decode([int(i) for i in row], skip_special_tokens) for row in rows]

    def __call__(self, text: str, *, return_tensors: str = "pt", add_special_tokens: bool = False) -> Any:
        """Ids of one text, as `.input_ids` int64 [1, n]."""
        import torch

        return _Encoding(torch.tensor([self._tokenizer.encode(text) if text else []], dtype=torch.int64))


class _Encoding(NamedTuple):
    input_ids: Any


class Upstream(NamedTuple):
    """NeMo-RL's pieces, checked against what is passed to them."""

    grpo_train: Any
    master_type: Any
    policy_class: Any
    generation_class: Any
    refit_class: Any
    batch_type: Any


def upstream() -> Upstream:
    """NeMo-RL's loop and interfaces, our classes adapted to them.

    Raises:
        UserError: the tree has moved: names what, with the signature found and the one wanted.
    """
    grpo_train = symbol("nemo_rl.algorithms.grpo:grpo_train")
    require_parameters(grpo_train, LOOP_ARGUMENTS, "grpo_train")
    require_mentions(grpo_train, LOOP_HOOKS, "grpo_train")
    policy = symbol("nemo_rl.models.policy.interfaces:ColocatablePolicyInterface")
    generation = symbol("nemo_rl.models.generation.interfaces:GenerationInterface")
    synchronizer = symbol("nemo_rl.weight_sync.interfaces:WeightSynchronizer")
    refit = symbol("nemo_rl.algorithms.grpo:refit_policy_generation")
    require_mentions(refit, ("weight_synchronizer", "sync_weights"), "refit_policy_generation")
    return Upstream(
        grpo_train,
        symbol("nemo_rl.algorithms.grpo:MasterConfig"),
        adapted(GroupPolicy, policy, beside=BESIDE_INTERFACE),
        adapted(EngineGeneration, generation),
        adapted(Refit, synchronizer),
        symbol("nemo_rl.distributed.batched_data_dict:BatchedDataDict"),
    )


def run(config: MasterConfig, *, resume: Path | None = None) -> Path:
    """Train as a recipe says, under NeMo-RL's `grpo_train`; returns the run folder.

    Args:
        config: a loaded recipe.
        resume: folder of a run to go on with; None starts a new one.

    Raises:
        UserError: no tree, one that has moved, or anything in the recipe that the user can correct.
    """
    source = require_tree()
    runtime = validate(config)
    refused = not_implemented(config, runtime)
    if refused:
        raise UserError(refused[0])
    check_classes(config)
    console = make_console()
    checkpoint = None if resume is None else latest_checkpoint(resume)
    if resume is not None:
        note_changes(console, recorded_config(resume), yaml.safe_load(config.resolved_yaml()))
    else:
        refuse_used_checkpoints(config)
    started = time.monotonic()
    with progress(console, "importing NeMo-RL"):
        patched = import_nemo_rl()
        parts = upstream()
    console.print(f"NeMo-RL {revision(source)} in {source}", highlight=False, soft_wrap=True, markup=False)
    if patched:
        console.print(f"patched (docs/nemo_rl.md): {', '.join(patched)}", highlight=False, soft_wrap=True)
    warn_of_biased_sampling(config, console)
    tokenizer = make_tokenizer(config)
    train_set, val_set = nemo_data.load_problems(config)
    loader, val_prompts = make_prompts(config, tokenizer, train_set, val_set)
    _, short = steps_of_run(config, loader)
    if short is not None:
        console.print(short, highlight=False, soft_wrap=True)
    settings = TrainerSettings.from_config(config)

    def upstream_config(config: MasterConfig, log_dir: Path | str, checkpoints: Path | str) -> Any:
        folders = {"log_dir": str(log_dir), "checkpoint_dir": str(checkpoints)}
        return master_config(parts.master_type, upstream_settings(config, val_samples=len(val_prompts), **folders))

    # What NeMo-RL refuses is refused before a process starts.
    upstream_config(config, config.logger.log_dir, config.checkpointing.checkpoint_dir)
    environment_variables = worker_environment(source, os.environ.get("PYTHONPATH", ""))
    with ray_cluster(config, environment_variables), ray_address(), registrations():
        config, group, engines = start_parts(config, tokenizer, train_set, console, lambda _: None)
        logger = open_folder(config, checkpoint, resume)
        (logger.run_dir / INSTALL_FILE).write_text(json.dumps(group.install_report(), indent=1), encoding="utf-8")
        folder = checkpoints_of(config, logger.run_dir, resume)
        master = upstream_config(config, logger.run_dir, folder)
        state = save_state(checkpoint)
        clock = RolloutClock(config.grpo.seed, state.total_steps)
        policy = parts.policy_class(group, clock, parts.batch_type, training_notes)
        generation = parts.generation_class(engines, clock, settings.validation_sampling, parts.batch_type)
        policy.connect(engines)
        generation.weight_synchronizer = parts.refit_class(policy, generation)
        train_loader = nemo_data.train_dataloader(loader, tokenizer)
        if checkpoint is not None:
            console.print(f"resuming from {checkpoint}", highlight=False, soft_wrap=True, markup=False)
            policy.load_checkpoint(checkpoint)
            symbol("nemo_rl.data.utils:load_dataloader_state")(train_loader, str(checkpoint), master.data)
        with nemo_logger(master, logger) as nemo_log, environment(config) as actor:
            symbol("nemo_rl.algorithms.utils:set_seed")(config.grpo.seed)
            with symbol("nemo_rl.utils.checkpoint:CheckpointManager")(master.checkpointing) as manager:
                parts.grpo_train(
                    policy=policy,
                    policy_generation=generation,
                    wrapped_dataloader=train_loader,
                    val_dataloader=nemo_data.validation_dataloader(val_prompts, tokenizer, master.grpo.val_batch_size)
                    if val_prompts
                    else None,
                    tokenizer=LoopTokenizer(tokenizer),
                    loss_fn=symbol("nemo_rl.algorithms.loss:ClippedPGLossFn")(master.loss_fn),
                    task_to_env={nemo_data.TASK: actor},
                    val_task_to_env={nemo_data.TASK: actor},
                    logger=nemo_log,
                    checkpointer=manager,
                    grpo_save_state=state,
                    master_config=master,
                )
    report(console, logger, folder, time.monotonic() - started)
    return logger.run_dir


@contextmanager
def ray_address() -> Iterator[None]:
    """`RAY_ADDRESS` names the cluster that this process is connected to.

    NeMo-RL's memory tracker asks Ray for "the" cluster of the machine in every phase, which fails where there are two.
    """
    import ray

    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before


def latest_checkpoint(resume: Path) -> Path:
    """The newest whole checkpoint of a run that NeMo-RL's loop wrote, hashes compared.

    Raises:
        UserError: there is none, or it is damaged, or of the embedded trainer.
    """
    folder = checkpoint_folder(recorded_config(resume)["checkpointing"]["checkpoint_dir"], resume)
    steps = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    if not steps:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without --resume")
    newest = max(steps, key=lambda path: int(path.name.removeprefix("step_")))
    read_checkpoint(newest)
    if not (newest / "train_dataloader.pt").is_file():
        raise UserError(
            f"{newest} is a checkpoint of the embedded trainer (no train_dataloader.pt); resume it with "
            "--trainer embedded"
        )
    return newest


def checkpoints_of(config: MasterConfig, run_dir: Path, resume: Path | None) -> Path:
    """Where this run's checkpoints go: a resumed run keeps its place, whatever the recipe says now."""
    recorded = config.checkpointing.checkpoint_dir
    if resume is not None:
        recorded = recorded_config(resume)["checkpointing"]["checkpoint_dir"]
    folder = checkpoint_folder(recorded, run_dir)
    if resume is None and config.checkpointing.enabled and any(folder.glob("step_*")):
        raise UserError(f"{folder} already holds checkpoints; set another checkpointing.checkpoint_dir, or --resume")
    return folder


def open_folder(config: MasterConfig, checkpoint: Path | None, resume: Path | None) -> RunLogger:
    """A new run folder, or the resumed one without the records of steps that will be made again."""
    if resume is None or checkpoint is None:
        return RunLogger(config.logger.log_dir, config.resolved_yaml(), NO_TRACKERS)
    step = int(checkpoint.name.removeprefix("step_"))
    return RunLogger.resume(resume, config.resolved_yaml(), step, NO_TRACKERS)


def save_state(checkpoint: Path | None) -> Any:
    """NeMo-RL's `GRPOSaveState`: of a checkpoint, or that of a new run (all counts 0)."""
    state_type = symbol("nemo_rl.algorithms.grpo:GRPOSaveState")
    values = {
        "consumed_samples": 0,
        "current_step": 0,
        "current_epoch": 0,
        "total_steps": 0,
        "total_valid_tokens": 0,
        "val_reward": -99999999.0,
    }
    known = {field.name for field in fields(state_type)}
    if checkpoint is not None:
        recorded = json.loads((checkpoint / "training_info.json").read_text(encoding="utf-8"))
        values |= {name: value for name, value in recorded.items() if name in known}
    return state_type(**{name: value for name, value in values.items() if name in known})


@contextmanager
def nemo_logger(master: Any, run_logger: RunLogger) -> Iterator[Any]:
    """NeMo-RL's logger with its trackers, and `metrics.jsonl` as one more of its backends."""
    logger = symbol("nemo_rl.utils.logger:Logger")(master.logger)
    backend = adapted(MetricsFile, symbol("nemo_rl.utils.logger:LoggerInterface"))(run_logger)
    logger.loggers.append(backend)
    logger.log_hyperparams(master.model_dump())
    try:
        yield logger
    finally:
        backend.flush()
        logger.finish()
        run_logger.discard_if_empty()


@contextmanager
def environment(config: MasterConfig) -> Iterator[Any]:
    """The environment's actor, made by NeMo-RL from its registry."""
    import ray
    from ray.exceptions import RayError

    settings = config.env.math.model_dump(include={"num_workers", "math_verify_impl"})
    actor = symbol("nemo_rl.environments.utils:create_env")(ENVIRONMENT_NAME, settings)
    try:
        yield actor
    finally:
        try:
            ray.get(actor.shutdown.remote(), timeout=10)
        except RayError as error:  # an actor that died has no processes left
            logging.getLogger(__name__).warning("the environment did not shut down by itself: %s", error)


def report(console: Any, logger: RunLogger, folder: Path, seconds: float) -> None:
    """Write plots and the summary, and print where everything is."""
    numbers = whole_run_summary(read_steps(logger.metrics_path))
    numbers |= {"stopped": "NeMo-RL's grpo_train returned", "seconds since this start": round(seconds, 1)}
    files = logger.finish(numbers)
    files["what was rounded"] = logger.run_dir / INSTALL_FILE
    shown = summary_lines(numbers)
    steps = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    if steps:
        newest = max(steps, key=lambda path: int(path.name.removeprefix("step_")))
        files["last checkpoint"] = newest
        shown["to serve it"] = export_command(newest)
    print_summary(console, shown, {"run folder": logger.run_dir, **files})
