"""Who does what: ranks on the mesh axes, and the way of a batch through them.

The mesh is (dp_replicate, dp_shard, cp, tp), the last axis fastest. Expert parallelism views the same ranks once more
as (ep_shard, ep), ep fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl_dsv4.config.master import MasterConfig

WIDEST_COMPRESSION = 128
"""Tokens behind one entry of the most compressed layers; a context-parallel rank holds a multiple of it."""


@dataclass(frozen=True)
class Rank:
    """Coordinates of one policy process; every number counts from 0."""

    rank: int
    node: int
    dp: int
    cp: int
    ep: int
    ep_shard: int


@dataclass(frozen=True)
class BatchFlow:
    """Sequences of one step on their way through generation and training."""

    prompts: int
    rollouts: int
    updates: int
    sequences_per_rank_and_update: int
    micro_batches_per_update: int
    scoring_passes: int


def ranks(config: MasterConfig) -> list[Rank]:
    """One entry per policy process, in rank order."""
    layout = config.policy.dtensor_cfg
    inner = layout.tensor_parallel_size
    per_node = config.world_size // (config.cluster.num_nodes - config.rollout_nodes)
    return [
        Rank(
            rank=rank,
            node=rank // per_node,
            dp=rank // (inner * layout.context_parallel_size),
            cp=rank // inner % layout.context_parallel_size,
            ep=rank % layout.expert_parallel_size,
            ep_shard=rank // layout.expert_parallel_size,
        )
        for rank in range(config.world_size)
    ]


def mesh_axes(config: MasterConfig) -> dict[str, int]:
    """Axis name -> size, slowest axis first, then the two axes of the expert view."""
    layout = config.policy.dtensor_cfg
    return {
        "dp_replicate": layout.dp_replicate_size,
        "dp_shard": config.data_parallel_size // layout.dp_replicate_size,
        "cp": layout.context_parallel_size,
        "tp": layout.tensor_parallel_size,
        "ep_shard": config.world_size // layout.expert_parallel_size,
        "ep": layout.expert_parallel_size,
    }


def batch_flow(config: MasterConfig) -> BatchFlow:
    """How the sequences of one step are divided."""
    grpo, policy = config.grpo, config.policy
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    per_rank = policy.train_global_batch_size // config.data_parallel_size
    return BatchFlow(
        prompts=grpo.num_prompts_per_step,
        rollouts=rollouts,
        updates=rollouts // policy.train_global_batch_size,
        sequences_per_rank_and_update=per_rank,
        micro_batches_per_update=math.ceil(per_rank / policy.train_micro_batch_size),
        scoring_passes=math.ceil(rollouts // config.data_parallel_size / policy.logprob_batch_size),
    )


def packed_length(config: MasterConfig) -> int:
    """Tokens that the longest row takes in a packed sequence."""
    return -(-config.policy.max_total_sequence_length // WIDEST_COMPRESSION) * WIDEST_COMPRESSION


def sequence_multiple(config: MasterConfig) -> int:
    """Batches are padded on the right to a multiple of this many tokens."""
    context_parallel = config.policy.dtensor_cfg.context_parallel_size
    needed = context_parallel * WIDEST_COMPRESSION if context_parallel > 1 else 1
    return math.lcm(config.policy.make_sequence_length_divisible_by, needed)
