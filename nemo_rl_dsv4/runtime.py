"""Run a validated recipe: the embedded runtime, on Ray actors and torch.distributed.

Reads top to bottom: tokenizer and data, processes, checkpoint, policy and rollout engines, the GRPO loop, the summary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import yaml

from nemo_rl_dsv4.cluster import check_hosts, hosts_needed, policy_hosts, ray_cluster
from nemo_rl_dsv4.config import MasterConfig, validate
from nemo_rl_dsv4.config.prompts import dataset_section, make_datasets, make_prompts, make_tokenizer, steps_of_run
from nemo_rl_dsv4.config.runs_here import not_implemented
from nemo_rl_dsv4.config.topology import packed_length
from nemo_rl_dsv4.data import Tokenizer
from nemo_rl_dsv4.environments import MathEnvironment
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.group import ReferenceGeneration, ReferenceSpec
from nemo_rl_dsv4.generation.vllm import VllmGeneration
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.settings import CheckpointSettings, TrainerSettings
from nemo_rl_dsv4.grpo.trainer import TrainingSummary, grpo_train
from nemo_rl_dsv4.model.checkpoint.serving import export_command, training_notes
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.policy.optim import rehearse
from nemo_rl_dsv4.policy.packing import Packing
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec
from nemo_rl_dsv4.rollout_engines import start_engines, vllm_spec
from nemo_rl_dsv4.routes import RouterMode
from nemo_rl_dsv4.utils.console import RunConsole, make_console, print_summary
from nemo_rl_dsv4.utils.hosts import reserve
from nemo_rl_dsv4.utils.metrics_file import read_steps
from nemo_rl_dsv4.utils.progress import bytes_progress, progress
from nemo_rl_dsv4.utils.run_folder import checkpoint_folder, next_run_name, recorded_config
from nemo_rl_dsv4.utils.run_logger import RunLogger
from nemo_rl_dsv4.utils.run_summary import summary_lines, whole_run_summary
from nemo_rl_dsv4.utils.shared_files import check_same_model

TINY = "tiny"
INSTALL_FILE = "rounding.json"
"""Written to the run folder: every module of the policy, what rounds there, what does not and why."""


def run(config: MasterConfig, *, resume: Path | None = None) -> TrainingSummary:
    """Train as a recipe says.

    Args:
        config: a loaded recipe.
        resume: folder of a run to go on with (`<logger.log_dir>/exp_NNN`); None starts a new one.

    Returns:
        What the trainer says of the run; files are in the run folder.

    Raises:
        UserError: anything in the recipe or the files it names that the user can correct.
    """
    runtime = validate(config)
    refused = not_implemented(config, runtime)
    if refused:
        raise UserError(refused[0])
    check_classes(config)
    console = make_console()
    if resume is not None:
        resumed_store(TrainerSettings.from_config(config).checkpointing, resume).latest()
        note_changes(console, recorded_config(resume), yaml.safe_load(config.resolved_yaml()))
    else:
        refuse_used_checkpoints(config)
    started = time.monotonic()
    tokenizer = make_tokenizer(config)
    train_set, val_set = make_datasets(config)
    loader, val_prompts = make_prompts(config, tokenizer, train_set, val_set)
    settings = TrainerSettings.from_config(config)
    warn_of_biased_sampling(config, console)
    steps, short = steps_of_run(config, loader)
    if short is not None:
        console.print(short, highlight=False, soft_wrap=True)
    with ray_cluster(config):
        progress_bars = RunConsole(console, steps)
        phases = Phases(progress_bars)
        # Engines that roll out beside training have no bar: the phase on show is another one.
        on_progress = (lambda count: None) if config.grpo.async_grpo.enabled else phases.advance
        config, group, generation = start_parts(config, tokenizer, train_set, console, on_progress)
        environment = MathEnvironment(
            num_workers=config.env.math.num_workers, verifier=config.env.math.math_verify_impl
        )
        logger, store, resume_from = open_run(config, settings.checkpointing, resume)
        (logger.run_dir / INSTALL_FILE).write_text(json.dumps(group.install_report(), indent=1), encoding="utf-8")
        if resume_from is not None:
            step = resume_from.name.removeprefix("step_")
            console.print(f"resuming from step {step} of {resume}", highlight=False, soft_wrap=True, markup=False)
        finished = False
        try:
            summary = grpo_train(
                group,
                generation,
                loader,
                val_prompts,
                tokenizer,
                environment,
                logger,
                settings,
                checkpoints=store,
                resume_from=resume_from,
                phases=phases,
            )
            finished = True
        finally:
            progress_bars.on_phase_end()
            settle_checkpoint(store, group, finished)
            environment.shutdown()
            if not finished:
                logger.discard_if_empty()
    report(console, logger, summary, time.monotonic() - started)
    return summary


class Parts(NamedTuple):
    """What a loop drives, built and loaded."""

    config: MasterConfig
    """The recipe, its rollout profile resolved."""
    group: PolicyGroup
    generation: ReferenceGeneration | VllmGeneration


def start_parts(
    config: MasterConfig, tokenizer: Tokenizer, train_set: list, console: Any, on_progress: Callable[[int], None]
) -> Parts:
    """Start the processes of policy and rollout, and give both the recipe's checkpoint; needs a running Ray.

    Args:
        on_progress: called with the number of responses each time some are finished.
    """
    hosts = reserve(hosts_needed(config)).hosts
    if len(hosts) > 1:
        shown = ", ".join(host.address for host in hosts)
        console.print(f"hosts, in the order of their ranks: {shown}", highlight=False, soft_wrap=True)
    check_hosts(config, hosts)
    group = PolicyGroup(
        config.world_size,
        device="cuda" if config.cluster.gpus_per_node else "cpu",
        hosts=policy_hosts(config, hosts),
        environment=config.policy.dtensor_cfg.env_vars,
        sees_host=config.policy.dtensor_cfg.automodel_kwargs.backend.dispatcher == "uccl_ep",
    )
    config = with_profile(config, group)
    generation = start_engines(config, tokenizer, on_progress, hosts, group)
    checkpoint = resolve_checkpoint(config, tokenizer, train_set, group, console)
    check_vocabulary(config, tokenizer, checkpoint)
    check_same_model(checkpoint, hosts)
    spec = (reference_spec if config.policy.generation.backend == "reference" else vllm_spec)(config, checkpoint)
    rounding = build_policy(config, checkpoint, group, console)
    with progress(console, "loading the rollout engine"):
        generation.build(spec)
    console.print(f"training rounds: {rounding}", highlight=False, soft_wrap=True)
    return Parts(config, group, generation)


LARGE_CHECKPOINT_BYTES = 1 << 30
"""From here on, loading shows how far it is."""


def build_policy(config: MasterConfig, checkpoint: Path, group: PolicyGroup, console: Any) -> str:
    """Give the ranks their model; returns what they round."""
    spec, batch = policy_spec(config, checkpoint), config.policy.train_global_batch_size
    if sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) < LARGE_CHECKPOINT_BYTES:
        with progress(console, "loading the policy"):
            return group.build(spec, global_batch_size=batch)
    with bytes_progress(console, "loading the policy, rank 0's part") as on_load:
        return group.build(spec, global_batch_size=batch, on_load=on_load)


SECONDS_FOR_LAST_CHECKPOINT = 10.0
"""How long Ctrl-C or SIGTERM waits for a checkpoint that is being written."""


def settle_checkpoint(store: CheckpointStore, group: PolicyGroup, finished: bool) -> None:
    """Before the processes end: let a checkpoint that is being written get done, but after Ctrl-C not for long."""
    interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    try:
        store.wait(SECONDS_FOR_LAST_CHECKPOINT if interrupted else None)
    except UserError as error:
        if finished:
            raise
        logging.getLogger(__name__).warning("%s", error)  # what stopped the run is the error to show
    finally:
        group.abandon_checkpoint()
        with contextlib.suppress(UserError):
            store.wait()


def check_classes(config: MasterConfig) -> None:
    """The optimizer and the schedule can be made and stepped: found out before a process starts.

    Raises:
        UserError: see `nemo_rl_dsv4.policy.optim.rehearse`.
    """
    policy = config.policy
    parts = None if policy.scheduler is None else [step.model_dump() for step in policy.scheduler]
    rehearse(policy.optimizer.name, policy.optimizer.kwargs, parts)


EXPECTED_CHANGES = ("grpo.max_num_steps", "grpo.max_num_epochs", "logger.", "checkpointing.", "grpo.val_")


def note_changes(console: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say which settings a resumed run goes on with that it was not started with."""
    for key, (left, right) in changed_keys(before, now).items():
        if not key.startswith(EXPECTED_CHANGES):
            console.print(f"note: resuming with {key} {left} -> {right}", highlight=False, soft_wrap=True, markup=False)


def warn_of_biased_sampling(config: MasterConfig, console: Any) -> None:
    """Say that ratios ignore a temperature or filter, where the recipe samples training rollouts with one."""
    generation = config.policy.generation
    changed = {
        "temperature": generation.temperature != 1.0,
        "top_p": generation.top_p != 1.0,
        "top_k": generation.top_k is not None,
    }
    for key, is_changed in changed.items():
        if is_changed:
            console.print(
                f"note: policy.generation.{key} is {getattr(generation, key)}; log-probabilities are those of the raw "
                "logits on both sides, so importance ratios do not know of it and the gradient is biased",
                highlight=False,
                soft_wrap=True,
            )


def resolve_checkpoint(
    config: MasterConfig, tokenizer: Tokenizer, train_set: list, group: PolicyGroup, console: Any
) -> Path:
    """The release-format checkpoint folder: the tiny model's (made if needed), a local folder, or a hub download."""
    name = config.policy.model_name
    if name != TINY:
        return local_or_hub_folder(name)
    from nemo_rl_dsv4.tiny.checkpoint import checkpoint_folder as tiny_folder
    from nemo_rl_dsv4.tiny.checkpoint import ensure_tiny_checkpoint

    assert config.policy.dsv4.tiny is not None  # validate() saw to it
    tiny = config.policy.dsv4.tiny.model_dump()
    dataset = dataset_section(config.data.train)
    folder = tiny_folder(tiny, dataset, tokenizer)
    if folder.is_dir():
        console.print(f"tiny model: {folder}", highlight=False, soft_wrap=True)
        return folder
    steps = tiny["warm_start"]["steps"]
    with progress(console, "making the tiny model (supervised warm start)", steps) as advance:
        return ensure_tiny_checkpoint(
            tiny,
            dataset,
            train_set,
            tokenizer,
            group=group,
            on_step=lambda step, loss: advance(1, f"loss {loss:.3f}"),
        )


def check_vocabulary(config: MasterConfig, tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Refuse a tokenizer with more ids than the model has, and stop tokens that no model output can be."""
    size = read_config(checkpoint, dict(config.policy.hf_config_overrides))["vocab_size"]
    if tokenizer.vocab_size > size:
        raise UserError(
            f"policy.tokenizer.name {config.policy.tokenizer.name!r} has {tokenizer.vocab_size} tokens but the model "
            f"in {checkpoint} has vocab_size {size}; use the tokenizer the checkpoint was made with"
        )
    beyond = [token for token in config.policy.generation.stop_token_ids or [] if token >= size]
    if beyond:
        raise UserError(f"policy.generation.stop_token_ids holds {beyond[0]}; the model has ids 0 to {size - 1}")


def local_or_hub_folder(name: str) -> Path:
    """A checkpoint folder as it is, or the folder a hub download leaves.

    Raises:
        UserError: the hub cannot be reached or has no such model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"policy.model_name is {name!r}: no such folder, and not to be had from the hub ({reason})"
        ) from error


def policy_spec(config: MasterConfig, checkpoint: Path) -> PolicySpec:
    """Settings of a training rank."""
    policy, layout = config.policy, config.policy.dtensor_cfg
    backend = layout.automodel_kwargs.backend.model_dump(
        include={"attn", "linear", "rms_norm", "experts", "dispatcher", "rope_fusion", "gate_precision"}
    )
    return PolicySpec(
        checkpoint=str(checkpoint.resolve()),
        sizes=ParallelSizes(
            config.world_size,
            cp=layout.context_parallel_size,
            ep=layout.expert_parallel_size,
            replicate=layout.dp_replicate_size,
        ),
        profile=config.policy.dsv4.rollout_profile,
        fake_quant=policy.dsv4.fake_quant.resolved(policy.dsv4.train_mode),
        fp8=policy.dsv4.train_mode == "fp8",
        alignment=policy.dsv4.alignment.chosen(),
        precision=policy.precision,
        backend=backend,
        micro_batch_size=policy.train_micro_batch_size,
        logprob_batch_size=policy.logprob_batch_size,
        optimizer=policy.optimizer.model_dump(),
        scheduler=[part.model_dump() for part in policy.scheduler] if policy.scheduler else None,
        max_grad_norm=policy.max_grad_norm,
        activation_checkpointing=layout.activation_checkpointing,
        config_overrides=dict(policy.hf_config_overrides),
        keep_reference=config.loss_fn.reference_policy_kl_penalty != 0,
        logprob_chunk_size=policy.logprob_chunk_size,
        router=router_mode(config),
        packing=packing(config),
        sequence_multiple=policy.make_sequence_length_divisible_by,
        device="cuda" if config.cluster.gpus_per_node else "cpu",
        cpu_offload=layout.cpu_offload,
        offload_optimizer_for_logprob=policy.offload_optimizer_for_logprob,
        trainer_sleep=policy.dsv4.trainer_sleep,
    )


def packing(config: MasterConfig) -> Packing | None:
    """`policy.sequence_packing` with its nulls resolved; None when it is off."""
    policy, section = config.policy, config.policy.sequence_packing
    if not section.enabled:
        return None
    longest = packed_length(config)
    return Packing(
        train_tokens=section.train_mb_tokens or longest * policy.train_micro_batch_size,
        logprob_tokens=section.logprob_mb_tokens or longest * policy.logprob_batch_size,
        algorithm=section.algorithm,
    )


def router_mode(config: MasterConfig) -> RouterMode:
    """What training does with the experts of the rollout; `OWN` also means that the engine records none."""
    if config.policy.dsv4.router_replay:
        return RouterMode.REPLAY
    return RouterMode.COMPARE if config.policy.dsv4.router_overlap_metrics else RouterMode.OWN


def reference_spec(config: MasterConfig, checkpoint: Path) -> ReferenceSpec:
    """Settings of a CPU rollout engine."""
    cfg = config.policy.generation.reference_cfg
    return ReferenceSpec(
        hf_config=read_config(checkpoint, dict(config.policy.hf_config_overrides)),
        profile=config.policy.dsv4.rollout_profile,
        tokenizer=str(checkpoint.resolve()) if config.policy.generation.stop_strings else None,
        batch_size=cfg.batch_size,
        length_slack=cfg.length_slack,
        experts=cfg.experts,
        num_threads=cfg.num_threads,
        max_length=config.policy.max_total_sequence_length,
        capture_routes=router_mode(config) is not RouterMode.OWN,
        precision=config.policy.precision,
        refit_checks=config.policy.dsv4.refit.checks,
        refit_on_finding=config.policy.dsv4.refit.on_finding,
    )


def with_profile(config: MasterConfig, group: PolicyGroup) -> MasterConfig:
    """The recipe with `policy.dsv4.rollout_profile: auto` replaced by the profile of the policy's GPUs."""
    if config.policy.dsv4.rollout_profile != "auto":
        return config
    dsv4 = config.policy.dsv4.model_copy(update={"rollout_profile": group.profile()})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dsv4": dsv4})})


def open_run(
    config: MasterConfig, settings: CheckpointSettings, resume: Path | None
) -> tuple[RunLogger, CheckpointStore, Path | None]:
    """The run folder, its checkpoints, and the checkpoint to start from."""
    logger_settings = config.logger.model_dump()
    if resume is None:
        logger = RunLogger(config.logger.log_dir, config.resolved_yaml(), logger_settings)
        folder = checkpoint_folder(settings.checkpoint_dir, logger.run_dir)
        return logger, CheckpointStore(folder, settings, training_notes), None
    store = resumed_store(settings, resume)
    resume_from = store.latest()
    step = int(resume_from.name.removeprefix("step_"))
    return ResumedLogger(resume, config.resolved_yaml(), step, logger_settings), store, resume_from


def refuse_used_checkpoints(config: MasterConfig) -> None:
    """Refuse checkpoints of another run where this one will write its own, before anything is loaded.

    Raises:
        UserError: the folder that the next run folder's name gives holds checkpoints.
    """
    settings, log_dir = TrainerSettings.from_config(config).checkpointing, Path(config.logger.log_dir)
    if settings.enabled:
        run_dir = log_dir / next_run_name(log_dir)
        CheckpointStore(checkpoint_folder(settings.checkpoint_dir, run_dir), settings).refuse_if_used()


def resumed_store(settings: CheckpointSettings, run_dir: Path) -> CheckpointStore:
    """The checkpoints of a run that exists: where its own config.yaml put them, whatever this recipe says."""
    recorded = recorded_config(run_dir)["checkpointing"]["checkpoint_dir"]
    return CheckpointStore(checkpoint_folder(recorded, run_dir), settings, training_notes)


def changed_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (before, now) of every value that differs between two resolved recipes."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        left, right = before.get(key), now.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            changed |= changed_keys(left, right, f"{prefix}{key}.")
        elif left != right:
            changed[f"{prefix}{key}"] = (left, right)
    return changed


class ResumedLogger(RunLogger):
    """A `RunLogger` that touches the run folder only once the resumed run has a step to log.

    Until then a resume may still be refused, and a refused resume changes nothing.
    """

    def __init__(self, run_dir: Path, config_yaml: str, last_step: int, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self._pending = (config_yaml, last_step, settings)
        self._opened = False

    def log_step(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """As `RunLogger.log_step`; the first call opens the folder and removes records of later steps."""
        if not self._opened:
            config_yaml, last_step, settings = self._pending
            self._open(self.run_dir, config_yaml, settings, last_step)
            self._opened = True
        super().log_step(step, metrics)

    def discard_if_empty(self) -> bool:
        """Close what was opened; an existing run is never removed."""
        if self._opened:
            self.close()
        return False


def report(console: Any, logger: RunLogger, summary: TrainingSummary, seconds: float) -> None:
    """Write plots and the summary, and print where everything is."""
    numbers = whole_run_summary(read_steps(logger.metrics_path))
    numbers |= {"stopped": summary.stop_reason, "seconds since this start": round(seconds, 1)}
    files = logger.finish(numbers)
    shown = summary_lines(numbers)
    files["what was rounded"] = logger.run_dir / INSTALL_FILE
    if summary.checkpoints:
        files["last checkpoint"] = summary.checkpoints[-1]
        shown["to serve it"] = export_command(summary.checkpoints[-1])
    print_summary(console, shown, {"run folder": logger.run_dir, **files})
