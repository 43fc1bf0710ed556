"""One recipe's plan: ranks, placements, memory by phase, traffic, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.topology import batch_flow, sequence_multiple
from nemo_rl_dsv4.generation.rollout_facts import FACTS
from nemo_rl_dsv4.model.official_names import expected_tensors
from nemo_rl_dsv4.planning import communication as comm
from nemo_rl_dsv4.planning import memory as mem
from nemo_rl_dsv4.planning.engine import EnginePlan, plan_engine, weight_bytes_per_rank
from nemo_rl_dsv4.planning.forward import ForwardCheck, check_forward
from nemo_rl_dsv4.planning.hardware import GIB, RUNTIME_BYTES
from nemo_rl_dsv4.planning.layout import Layout, lay_out
from nemo_rl_dsv4.planning.memory import Part
from nemo_rl_dsv4.planning.model_config import planned_config
from nemo_rl_dsv4.policy.parallel import ParallelSizes

LAYOUT = "policy.dtensor_cfg"
ENGINE = "policy.generation.vllm_cfg"
KEPT = {"weights", "optimizer states", "reference weights", "rounded weights"}
"""What a rank keeps between its calls."""
POOL = "kv_cache_memory_bytes"
STAGES = 4
"""Calls of `on_stage`: model configuration, layout, forward, sums."""

Phases = dict[str, list[Part]]


@dataclass(frozen=True)
class Plan:
    """Everything that `nemo-rl-dsv4 plan` shows; bytes are those of one GPU."""

    hf_config: dict[str, Any]
    sizes: ParallelSizes
    row_length: int
    passes: comm.Passes
    layout: Layout
    forward: ForwardCheck
    engine: EnginePlan | None
    phases: Phases
    traffic: list[comm.Traffic]
    gpu: int | None
    findings: list[str]

    @property
    def sleeping_bytes(self) -> int:
        """Host memory that a rank needs while it sleeps (`policy.dsv4.trainer_sleep`); 0 if it never does."""
        if "generation" not in self.phases:
            return 0
        stays = {part.name for part in self.phases["generation"]}
        return sum(part.bytes for part in self.phases["training"] if part.name in KEPT - stays)

    @property
    def totals(self) -> dict[str, int]:
        """Phase -> bytes."""
        return mem.parts_total(self.phases)


def make_plan(config: MasterConfig, gpu: int | None, on_stage: Callable[[str], None] = lambda _: None) -> Plan:
    """Plan a validated recipe.

    Args:
        config: the recipe.
        gpu: memory of one GPU in bytes; None plans without a limit.
        on_stage: told what is done next, `STAGES` times.

    Raises:
        UserError: the model is not known here, or its sizes do not fit the layout.
    """
    on_stage("reading the model's sizes")
    hf_config = planned_config(config)
    policy, layout_cfg = config.policy, config.policy.dtensor_cfg
    backend = layout_cfg.automodel_kwargs.backend
    sizes = ParallelSizes(
        config.world_size,
        cp=layout_cfg.context_parallel_size,
        ep=layout_cfg.expert_parallel_size,
        replicate=layout_cfg.dp_replicate_size,
    )
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[policy.precision]
    on_stage(f"laying {hf_config['num_hidden_layers']} layers over {sizes.world} ranks")
    layout = lay_out(
        hf_config, sizes, compute_dtype=dtype, activation_checkpointing=layout_cfg.activation_checkpointing
    )
    multiple = sequence_multiple(config)
    length = -(-policy.max_total_sequence_length // multiple) * multiple
    on_stage(f"running the forward pass of a row of {length} tokens on shapes alone")
    forward = check_forward(
        hf_config,
        sizes,
        rows=policy.train_micro_batch_size,
        length=length,
        attn=backend.attn,
        dispatcher=backend.dispatcher,
        dtype=dtype,
    )
    on_stage("adding up")
    flow = batch_flow(config)
    keeps_reference = config.loss_fn.reference_policy_kl_penalty != 0
    passes = comm.Passes(
        training=flow.micro_batches_per_update * flow.updates,
        scoring=flow.scoring_passes * (2 if keeps_reference else 1),
        recomputes=layout_cfg.activation_checkpointing,
    )
    engine = _engine(config, hf_config, gpu)
    phases = _phases(config, hf_config, sizes, layout, forward, engine, keeps_reference)
    traffic = _traffic(config, hf_config, sizes, layout, forward, passes)
    findings = _findings(config, phases, engine, gpu)
    return Plan(hf_config, sizes, length, passes, layout, forward, engine, phases, traffic, gpu, findings)


def _engine(config: MasterConfig, hf_config: dict[str, Any], gpu: int | None) -> EnginePlan | None:
    generation = config.policy.generation
    if generation.backend != "vllm" or not generation.colocated.enabled:
        return None
    cfg, pool = generation.vllm_cfg, generation.vllm_kwargs.get(POOL)
    if gpu is None and pool is None:
        return None
    return plan_engine(
        hf_config,
        gpu=gpu,
        utilization=cfg.gpu_memory_utilization,
        pool=pool,
        tensor_parallel=cfg.tensor_parallel_size * cfg.pipeline_parallel_size,
        engines=config.world_size // (cfg.tensor_parallel_size * cfg.pipeline_parallel_size),
        sequences=batch_flow(config).rollouts,
        length=config.policy.max_total_sequence_length,
        fp8_weights=cfg.precision == "fp8",
        fp8_kv=cfg.kv_cache_dtype != "auto",
    )


def _phases(
    config: MasterConfig,
    hf_config: dict[str, Any],
    sizes: ParallelSizes,
    layout: Layout,
    forward: ForwardCheck,
    engine: EnginePlan | None,
    keeps_reference: bool,
) -> Phases:
    policy, cfg = config.policy, config.policy.dtensor_cfg
    on_gpu = config.cluster.gpus_per_node > 0
    tokens = forward.ids_shape[0] * forward.ids_shape[1]
    shrink = (f"{LAYOUT}.expert_parallel_size", "cluster.num_nodes")
    rows = (
        *(("policy.train_micro_batch_size",) if policy.train_micro_batch_size > 1 else ()),
        *(() if cfg.activation_checkpointing else (f"{LAYOUT}.activation_checkpointing",)),
        f"{LAYOUT}.context_parallel_size",
        "policy.max_total_sequence_length",
    )
    runtime = Part("driver and libraries (assumed)", RUNTIME_BYTES if on_gpu else 0)
    weights = Part("weights", mem.weight_bytes(layout), shrink)
    gathered = Part("gathered weights", layout.gathered_bytes, ())
    optimizer = Part("optimizer states", mem.optimizer_bytes(layout), shrink)
    reference = Part("reference weights", mem.weight_bytes(layout) if keeps_reference else 0, shrink)
    rounded = Part(
        "rounded weights",
        mem.rounded_weight_bytes(layout, rounds=policy.dsv4.train_mode != "bf16"),
        shrink,
    )
    dispatch = Part(
        "dispatch buffers",
        mem.dispatch_bytes(
            cfg.automodel_kwargs.backend.dispatcher,
            sizes.ep,
            tokens,
            hf_config["hidden_size"],
            gpus_per_node=max(config.cluster.gpus_per_node, 1),
        ),
        (f"{LAYOUT}.automodel_kwargs.backend.dispatcher",),
    )
    both = [weights, gathered, reference, rounded, dispatch]
    of_engine = _engine_parts(config, engine)

    def logits(training: bool) -> Part:
        size = mem.logits_bytes(tokens, hf_config["vocab_size"], policy.logprob_chunk_size, training=training)
        return Part("logits", size, ("policy.logprob_chunk_size",))

    activations = mem.activation_bytes(forward.blocks, checkpointing=cfg.activation_checkpointing)
    phases: Phases = {
        "training": [
            *both,
            Part("gradients", mem.gradient_bytes(layout), shrink),
            Part("gradient buffers", mem.gradient_buffer_bytes(layout)),
            optimizer,
            Part("activations", activations, rows),
            logits(True),
            *of_engine["training"],
            runtime,
        ],
        "scoring": [
            *both,
            *([] if policy.offload_optimizer_for_logprob else [optimizer]),
            Part("activations", mem.scoring_bytes(forward.blocks), rows),
            logits(False),
            *of_engine["scoring"],
            runtime,
        ],
    }
    if engine is not None:
        buffer = int((policy.generation.vllm_cfg.refit_buffer_size_gb or 1) * GIB)
        sleeps = policy.dsv4.trainer_sleep
        resting = [
            replace(part, keys=(*part.keys, "policy.dsv4.trainer_sleep"))
            for part in (weights, optimizer, reference, rounded)
        ]
        phases["refit"] = [
            weights,
            *([] if sleeps else resting[1:2]),
            reference,
            rounded,
            dispatch,
            Part("largest tensor made whole", mem.gathered_tensor_bytes(layout)),
            Part("refit buffers (two)", 2 * buffer, (f"{ENGINE}.refit_buffer_size_gb",)),
            *of_engine["refit"],
            runtime,
        ]
        phases["generation"] = [*([] if sleeps else resting), dispatch, *of_engine["generation"], runtime]
    return {phase: [part for part in parts if part.bytes] for phase, parts in phases.items()}


def _engine_parts(config: MasterConfig, engine: EnginePlan | None) -> Phases:
    """What a colocated engine holds in each phase: all it has, unless it sleeps; then its pool comes after a refit."""
    if engine is None:
        return {"training": [], "scoring": [], "refit": [], "generation": []}
    weights = Part("engine weights", engine.weights, (f"{ENGINE}.tensor_parallel_size",))
    pool = Part("KV pool", max(engine.kv_pool, 0), _pool_keys(config)[:1])
    runtime = Part("engine's driver and libraries (assumed)", RUNTIME_BYTES)
    generation = [weights, pool, runtime]
    if config.policy.dsv4.engine_sleep:
        asleep = [Part("sleeping engine (assumed)", RUNTIME_BYTES)]
        return {"training": asleep, "scoring": asleep, "refit": [weights, runtime], "generation": generation}
    idle_weights, idle_pool = (replace(part, keys=(*part.keys, "policy.dsv4.engine_sleep")) for part in (weights, pool))
    awake = [idle_weights, idle_pool, runtime]
    return {"training": awake, "scoring": awake, "refit": [weights, idle_pool, runtime], "generation": generation}


def _pool_keys(config: MasterConfig) -> tuple[str, ...]:
    """Keys that decide the size of the KV pool, first the one that does nothing else."""
    if config.policy.generation.vllm_kwargs.get(POOL) is not None:
        return (f"policy.generation.vllm_kwargs.{POOL}",)
    return f"{ENGINE}.gpu_memory_utilization", f"{ENGINE}.tensor_parallel_size"


def _traffic(
    config: MasterConfig,
    hf_config: dict[str, Any],
    sizes: ParallelSizes,
    layout: Layout,
    forward: ForwardCheck,
    passes: comm.Passes,
) -> list[comm.Traffic]:
    node = config.cluster.gpus_per_node or config.world_size
    tokens = forward.ids_shape[0] * forward.ids_shape[1]
    profile = config.policy.dsv4.rollout_profile
    fp8 = (profile == "auto" or FACTS[profile].quantized) and config.policy.generation.vllm_cfg.precision != "bfloat16"
    export = weight_bytes_per_rank(hf_config, fp8=fp8, tensor_parallel=1)
    return [
        *comm.fsdp_traffic(layout, passes, node),
        comm.expert_traffic(
            hf_config,
            passes,
            dispatcher=config.policy.dtensor_cfg.automodel_kwargs.backend.dispatcher,
            ranks=sizes.ep,
            tokens=tokens,
            gpus_per_node=node,
        ),
        comm.context_traffic(hf_config, passes, ranks=sizes.cp, tokens=tokens, gpus_per_node=node),
        comm.refit_traffic(export, ranks=sizes.world, gpus_per_node=node),
    ]


def _findings(config: MasterConfig, phases: Phases, engine: EnginePlan | None, gpu: int | None) -> list[str]:
    """One sentence for each thing that does not fit, with the keys that would help most."""
    if gpu is None:
        return []
    found = []
    for phase, parts in phases.items():
        total = sum(part.bytes for part in parts)
        if total <= gpu:
            continue
        helpful = sorted((part for part in parts if part.keys), key=lambda part: part.bytes, reverse=True)[:2]
        advice = "; ".join(
            f"{part.name} ({part.bytes / GIB:.1f} GiB): change {' or '.join(part.keys)}" for part in helpful
        )
        found.append(
            f"{phase} needs {total / GIB:.1f} GiB of {gpu / GIB:.1f} GiB on every GPU. {advice or 'take a larger GPU'}"
        )
    length = config.policy.max_total_sequence_length
    if engine is not None and engine.tokens_held < length:
        found.append(
            f"the KV pool of {max(engine.kv_pool, 0) / GIB:.1f} GiB holds less than one sequence of {length} tokens "
            f"beside {engine.kv_windows / GIB:.1f} GiB of sliding windows; raise {' or '.join(_pool_keys(config))}"
        )
    return found


def stored_parameters(hf_config: dict[str, Any]) -> int:
    """Parameters by the checkpoint's own list of tensors, integer tables left out: a second count of the model."""
    total = 0
    for name, shape in expected_tensors(hf_config).items():
        if name.endswith(("tid2eid", "gate.bias")):
            continue
        numel = 1
        for size in shape:
            numel *= size
        total += numel
    return total
