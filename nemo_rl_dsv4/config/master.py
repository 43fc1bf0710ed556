"""The whole recipe."""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import PrivateAttr

from nemo_rl_dsv4.config.algorithm import GRPO, ClippedPGLoss, RewardPenalties
from nemo_rl_dsv4.config.policy import Policy
from nemo_rl_dsv4.config.run import Checkpointing, Cluster, Data, Env, Logger
from nemo_rl_dsv4.config.section import DisabledSection, Section


class MasterConfig(Section):
    """A recipe after inheritance, overrides and interpolation; sections and keys are NeMo-RL's."""

    grpo: GRPO = GRPO()
    """Algorithm."""
    loss_fn: ClippedPGLoss = ClippedPGLoss()
    """Loss."""
    reward_penalties: RewardPenalties = RewardPenalties()
    """NeMo-Gym's penalties."""
    checkpointing: Checkpointing = Checkpointing()
    """Saving."""
    policy: Policy
    """Model, layout, rollout."""
    data: Data
    """Problems."""
    env: Env = Env()
    """Scoring."""
    logger: Logger = Logger()
    """Metrics."""
    cluster: Cluster = Cluster()
    """Machines."""
    data_plane: DisabledSection | None = None
    """Only disabled: NeMo-RL's TransferQueue."""
    on_policy_distillation: None = None
    """Only null: no teacher."""
    runtime: Literal["auto", "embedded", "nemo_rl"] = "auto"
    """What drives the loop; `auto` takes NeMo-RL where its source tree can be imported."""

    _notices: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notices(self) -> tuple[str, ...]:
        """What the loader changed on the way and the user should know, one sentence each."""
        return self._notices

    @property
    def world_size(self) -> int:
        """Policy processes: `policy.dsv4.cpu_processes` on CPUs, else the cluster's GPUs less those of a rollout that
        has its own."""
        if self.cluster.gpus_per_node == 0:
            return self.policy.dsv4.cpu_processes
        return self.cluster.gpus_per_node * self.cluster.num_nodes - self.rollout_gpus

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generation has for itself; 0 where it shares the policy's.

        As in NeMo-RL: in a cluster of several nodes whole nodes (`resources.num_nodes`), in one node some of its GPUs
        (`resources.gpus_per_node`).
        """
        colocated, cluster = self.policy.generation.colocated, self.cluster
        if colocated.enabled or cluster.gpus_per_node == 0:
            return 0
        if cluster.num_nodes == 1:
            return colocated.resources.gpus_per_node or 0
        return self.rollout_nodes * cluster.gpus_per_node

    @property
    def rollout_nodes(self) -> int:
        """Nodes that generation has for itself; the policy has the others."""
        colocated, cluster = self.policy.generation.colocated, self.cluster
        if colocated.enabled or cluster.gpus_per_node == 0 or cluster.num_nodes == 1:
            return 0
        return colocated.resources.num_nodes or 0

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different sequences: the world divided by tensor and context parallel ranks."""
        layout = self.policy.dtensor_cfg
        return self.world_size // (layout.tensor_parallel_size * layout.context_parallel_size)

    def resolved_yaml(self) -> str:
        """The recipe as YAML that loads to an equal configuration, without `defaults:` or interpolation."""
        return yaml.safe_dump(
            self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True, width=120
        )
