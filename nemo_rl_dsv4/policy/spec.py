"""What a policy rank needs to build itself, as plain data that travels to its process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model, materialize, resolve_dtype
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.load import load_into, total_bytes
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.numerics import RolloutProfile, get_profile
from nemo_rl_dsv4.policy.dispatcher import check_dispatcher, check_hash_tables
from nemo_rl_dsv4.policy.export_source import ExportSource
from nemo_rl_dsv4.policy.packing import Packing
from nemo_rl_dsv4.policy.parallel import ParallelSizes, create_meshes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit.encode import Encoder
from nemo_rl_dsv4.refit.source_scales import SourceScales
from nemo_rl_dsv4.refit.verify import ExportCheck
from nemo_rl_dsv4.routes import RouterMode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicySpec:
    """Settings of one policy rank; every rank of a group gets the same.

    Attributes:
        checkpoint: release-format checkpoint folder; None for random weights of `hf_config` from `seed`.
        sizes: ranks on each axis.
        profile: name of the rollout profile.
        fake_quant: site group -> rounded in training.
        fp8: multiply in FP8 where both operands are rounded.
        alignment: switch -> value, for those that do not follow the profile.
        precision: `float32` or `bfloat16`.
        backend: AutoModel backend fields.
        config_overrides: values that replace those of the checkpoint's config.json.
        logprob_chunk_size: positions whose logits exist at once; None for all.
        packing: several rows in one sequence; None for one row a sequence.
        sequence_multiple: sequences of the model's input are padded to a multiple of this many tokens.
        device: `cpu` or `cuda` (the current device of the process).
        cpu_offload: keep sharded weights, gradients and optimizer state in host memory.
        offload_optimizer_for_logprob: keep optimizer state in host memory while scoring.
        trainer_sleep: keep optimizer state in host memory during a refit, and all else too while engines generate.
        keep_reference: keep the initial weights for a KL penalty.
        router: what to do with the experts that the rollout recorded.
    """

    checkpoint: str | None
    sizes: ParallelSizes
    profile: str
    fake_quant: Mapping[str, bool]
    precision: str
    backend: Mapping[str, Any]
    micro_batch_size: int
    logprob_batch_size: int
    optimizer: Mapping[str, Any]
    scheduler: list[Mapping[str, Any]] | None = None
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    keep_reference: bool = False
    router: RouterMode = RouterMode.OWN
    hf_config: Mapping[str, Any] | None = None
    seed: int = 0
    fp8: bool = False
    logprob_chunk_size: int | None = None
    packing: Packing | None = None
    sequence_multiple: int = 1
    device: str = "cpu"
    cpu_offload: bool = False
    offload_optimizer_for_logprob: bool = False
    trainer_sleep: bool = False
    alignment: Mapping[str, bool] = field(default_factory=dict)

    @property
    def export_source(self) -> ExportSource:
        """What a training checkpoint notes down for an export of its weights."""
        rounded = bool(self.fake_quant.get("weights"))
        return ExportSource(self.checkpoint, self.profile, rounded, self.precision)


def check_scale_kind(checkpoint: Path, hf_config: Mapping[str, Any], profile: RolloutProfile) -> bool:
    """Refuse a quantized checkpoint whose scales are of another kind than the rollout's.

    Returns:
        Whether its weights have to be compared with what the rollout can hold: both are quantized.

    Raises:
        UserError: power-of-two scales against float scales, or the other way round.
    """
    quantization = hf_config.get("quantization_config")
    weight = profile.site("linear.weight")
    if not quantization or weight is None:
        return False
    found = "ue8m0" if quantization.get("scale_fmt") == "ue8m0" else "float32"
    if found != weight.scale:
        raise UserError(
            f"{checkpoint}: scales are {found} (quantization_config.scale_fmt {quantization.get('scale_fmt')!r}), but "
            f"rollout profile {profile.name} rounds weights with {weight.scale} scales; take a profile that fits"
        )
    return True


def weights_device(spec: PolicySpec) -> torch.device:
    """Where this rank's weights live between uses."""
    return torch.device("cpu" if spec.cpu_offload else spec.device)


OnLoad = Callable[[int, int], None]
"""Hears (bytes read, bytes to read) of this rank's part of a checkpoint."""


def load_weights(
    model: torch.nn.Module, spec: PolicySpec, hf_config: Mapping[str, Any], on_load: OnLoad | None = None
) -> SourceScales:
    """Read this rank's part of `spec.checkpoint` into a model that was built on meta and is sharded by now.

    Returns:
        The checkpoint's scales that this rank's export needs: of the experts that it holds, and of all other weights.

    Raises:
        UserError: any damage; scales of another kind than the profile's; weights whose values change on export (FP4
            experts whose scales lie further apart than an FP8 block can hold).
    """
    assert spec.checkpoint is not None
    folder, profile = Path(spec.checkpoint), get_profile(spec.profile)
    check = ExportCheck(profile) if check_scale_kind(folder, hf_config, profile) else None
    materialize(model, weights_device(spec))
    checkpoint = check_checkpoint(folder, config_overrides=spec.config_overrides)
    checkpoint.raise_if_damaged()
    done, total, held = 0, total_bytes(model, checkpoint), set[str]()

    def on_stored(name: str, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        held.add(name)
        if check is not None:
            check(name, data, scale)

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if on_load is not None:
            on_load(done, total)

    report = load_into(model, checkpoint, on_stored=on_stored, advance=advance, device=torch.device(spec.device))
    log.info("read %d tensors, %.2f GiB in %.1f s", report.tensors, report.bytes / 2**30, report.seconds)
    if check is not None and check.changed:
        name, error = max(check.changed.items(), key=lambda item: item[1])
        raise UserError(
            f"{folder}: {len(check.changed)} tensors would change on the way to the rollout, most of all "
            f"{name!r} (relative error {error:.2g}); its scales lie too far apart for profile {profile.name}"
        )
    encoder = Encoder(profile)
    return SourceScales.of_checkpoint(
        checkpoint, encoder.spec, lambda name: name in held or tensor_kind(name) != "expert.weight"
    )


def check_sizes(hf_config: Mapping[str, Any], spec: PolicySpec) -> None:
    """Refuse parallel sizes that do not fit the model or the process group, before any weight is read.

    Raises:
        UserError: expert-parallel ranks that do not divide the experts, a process group of another size, or a GPU that
            is not there.
    """
    experts, ranks = int(hf_config["n_routed_experts"]), spec.sizes.ep
    if experts % ranks:
        raise UserError(
            f"the model has {experts} routed experts, which policy.dtensor_cfg.expert_parallel_size = {ranks} does not "
            "divide; choose a divisor"
        )
    started = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if started != spec.sizes.world:
        raise UserError(f"the settings are for {spec.sizes.world} training processes, but {started} were started")
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UserError("a policy rank was asked to train on a GPU, but torch.cuda.is_available() is false here")


def local_world_size() -> int:
    """Policy processes of this node: `LOCAL_WORLD_SIZE` as torchrun and NeMo-RL set it, else this machine's GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 1)


def build_worker(spec: PolicySpec, on_load: OnLoad | None = None) -> PolicyWorker:
    """Build one rank: model, weights, rounding, sharding, optimizer. Needs `torch.distributed` when world > 1.

    Args:
        spec: its settings.
        on_load: called after every piece of the checkpoint that was read.
    """
    check_dispatcher(spec.backend, ranks=spec.sizes.ep, gpus_per_node=local_world_size())
    profile = get_profile(spec.profile)
    if spec.checkpoint is None:
        hf_config = {**(spec.hf_config or {}), **spec.config_overrides}
    else:
        hf_config = read_config(Path(spec.checkpoint), spec.config_overrides)
    check_sizes(hf_config, spec)
    model = build_model(
        automodel_config(hf_config),
        backend=spec.backend,
        dtype=resolve_dtype(spec.precision),
        seed=spec.seed,
        device=weights_device(spec) if spec.checkpoint is None else torch.device("meta"),
    )
    load = None if spec.checkpoint is None else partial(load_weights, spec=spec, hf_config=hf_config, on_load=on_load)
    worker = PolicyWorker(
        model,
        create_meshes(spec.sizes),
        load=load,
        profile=profile,
        fake_quant=spec.fake_quant,
        alignment=spec.alignment,
        micro_batch_size=spec.micro_batch_size,
        logprob_batch_size=spec.logprob_batch_size,
        optimizer=spec.optimizer,
        scheduler=spec.scheduler,
        max_grad_norm=spec.max_grad_norm,
        activation_checkpointing=spec.activation_checkpointing,
        keep_reference=spec.keep_reference,
        logprob_chunk_size=spec.logprob_chunk_size,
        router=spec.router,
        packing=spec.packing,
        sequence_multiple=spec.sequence_multiple,
        compute_dtype=resolve_dtype(spec.precision),
        cpu_offload=spec.cpu_offload,
        offload_optimizer_for_logprob=spec.offload_optimizer_for_logprob,
        fp8=spec.fp8,
    )
    check_hash_tables(worker.model, str(spec.backend.get("dispatcher", "torch")))
    return worker
