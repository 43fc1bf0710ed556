"""Lay an AutoModel DeepSeek-V4 over data, context and expert parallel ranks.

Expert parallelism re-views the same ranks as data x context parallelism: with world = dp x cp, the expert mesh is
(ep_shard, ep) over those very ranks. AutoModel's own parallelizer does the sharding; two of its pieces do not work
without TransformerEngine or outside rank 0's group and are replaced here, from outside, by equivalents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from nemo_automodel.components.distributed.mesh_utils import _create_device_meshes
from nemo_automodel.components.models.deepseek_v4 import cp as v4_cp
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.moe import parallelizer as moe_parallelizer
from nemo_automodel.components.moe.layers import MoE
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.dispatcher import permute_without_transformer_engine


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks on each axis. `dp` is what is left of the world after context parallelism.

    `replicate` copies of the sharded model share the data-parallel axis: 1 shards over all of it (FSDP), the whole axis
    keeps a full model on every rank and averages gradients. Nothing in between is supported.
    """

    world: int
    cp: int = 1
    ep: int = 1
    replicate: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "cp", "ep", "replicate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} size is {getattr(self, name)}; wanted 1 or more")
        if self.world % self.cp:
            raise UserError(
                f"context_parallel_size {self.cp} does not divide the {self.world} training processes; "
                "change policy.dtensor_cfg.context_parallel_size or the number of processes"
            )
        if self.world % self.ep:
            raise UserError(
                f"expert_parallel_size {self.ep} does not divide the {self.world} training processes; "
                "change policy.dtensor_cfg.expert_parallel_size or the number of processes"
            )

        if self.replicate not in (1, self.dp) or (self.replicate > 1 and (self.cp > 1 or self.ep > 1)):
            raise UserError(
                f"dp_replicate_size {self.replicate} does not fit data parallel {self.dp}, context parallel {self.cp}, "
                f"expert parallel {self.ep}; wanted 1 (sharded), or all data-parallel ranks without the other two"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world // self.cp

    @property
    def replicated(self) -> bool:
        """Every rank holds the whole model; also true in a world of one."""
        return self.replicate == self.world


class _GatherAlongDim(torch.autograd.Function):
    """All-gather a tensor along `dim`; the backward sums every rank's gradient and keeps the local slice.

    Works for any process group. (torch's functional all_gather addresses the group's ranks as global ranks in its gloo
    backward, which is wrong for every group but the world.)
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, tensor.shape[dim]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.length
        return total.narrow(ctx.dim, start, ctx.length).contiguous(), None, None


def gather_along_dim(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's `tensor` of `group`, concatenated along `dim` in rank order; differentiable."""
    return _GatherAlongDim.apply(tensor, dim % tensor.ndim, group)


def _cp_all_gather(tensor: torch.Tensor, *, dim: int, cp_group: Any) -> torch.Tensor:
    return gather_along_dim(tensor, dim, cp_group) if v4_cp.dsv4_cp_enabled(cp_group) else tensor


def _apply_cp(model: torch.nn.Module, cp_mesh: DeviceMesh, cp_comm_type: str = "p2p") -> None:
    """Give every attention its context-parallel group and every MoE its mesh (no TransformerEngine needed)."""
    del cp_comm_type
    for module in model.modules():
        if isinstance(module, v4_layers.DeepseekV4Attention):
            module.setup_cp_attention(cp_mesh)
        elif isinstance(module, MoE):
            module.cp_mesh = cp_mesh


def _patch_automodel() -> None:
    v4_cp.dsv4_cp_all_gather = _cp_all_gather
    v4_layers.dsv4_cp_all_gather = _cp_all_gather
    moe_parallelizer.apply_cp = _apply_cp


def settle_gradients(parameters: Iterable[torch.nn.Parameter], *, world: int) -> None:
    """Leave a gradient to those trainable parameters that a token of this step used, on any rank, and to no others.

    Short rows use no ratio-128 compressor. Under context parallelism AutoModel fills in zeros for it, and from then on
    for every model of the process; elsewhere it has no gradient. An optimizer's weight decay and momentum would act on
    it in one layout and not in the other. A gradient of zeros everywhere counts as none.

    Args:
        parameters: of a model, gradients reduced and finite.
        world: number of ranks; all of them call this.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    local = {i: local_shard(p.grad.detach()) for i, p in enumerate(trainable) if p.grad is not None}
    at = [index for index, grad in local.items() if grad.numel()]
    used = torch.zeros(len(trainable), dtype=torch.int32, device=local_shard(trainable[0]).device)
    if at:
        largest = torch.stack(torch._foreach_norm([local[index] for index in at], float("inf")))
        used[at] = (largest > 0).to(torch.int32)
    if world > 1:
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, flag in zip(trainable, used.tolist(), strict=True):
        if not flag:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, which shares its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over all ranks, in one all-reduce.

    A parameter that no rank used keeps no gradient; one that only some ranks used counts as zero on the others, as
    under FSDP.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    device = trainable[0].device
    used = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    chosen = [parameter for parameter, flag in zip(trainable, used.tolist(), strict=True) if flag]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flat = torch.cat([grad.detach().reshape(-1).float() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, grad, mean in zip(chosen, grads, flat.split([g.numel() for g in grads]), strict=True):
        parameter.grad = mean.view_as(grad).to(grad.dtype)


@dataclass
class Meshes:
    """Process meshes of one rank; None where every rank holds the whole model."""

    sizes: ParallelSizes
    world: DeviceMesh | None = None
    moe: DeviceMesh | None = None

    def _rank(self, axis: str) -> int:
        return 0 if self.world is None else self.world[axis].get_local_rank()

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel index."""
        return self._rank("dp_shard")

    @property
    def cp_rank(self) -> int:
        """This rank's context-parallel index."""
        return self._rank("cp")

    @property
    def cp_group(self) -> Any:
        """The context-parallel process group, or None without context parallelism."""
        return self.world["cp"].get_group() if self.world is not None and self.sizes.cp > 1 else None


def create_meshes(sizes: ParallelSizes) -> Meshes:
    """Create the device meshes; `torch.distributed` must be initialized when `sizes.world` > 1."""
    if sizes.replicated:
        return Meshes(sizes)
    world, moe = _create_device_meshes(
        FSDP2Config(),
        ParallelismSizes(dp_size=sizes.dp, cp_size=sizes.cp, ep_size=sizes.ep),
        world_size=sizes.world,
    )
    return Meshes(sizes, world, moe)


def parallelize(
    model: torch.nn.Module,
    meshes: Meshes,
    *,
    activation_checkpointing: bool = False,
    compute_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
) -> torch.nn.Module:
    """Shard a built model over `meshes` in place and return it.

    Call it after weights are loaded and fake quantization is installed, and before the optimizer is made.

    Args:
        activation_checkpointing: recompute activations in the backward pass.
        compute_dtype: dtype of a product's weights; gradients are reduced in float32.
        cpu_offload: keep shards, their gradients and the optimizer's state in host memory.

    Raises:
        UserError: offload without shards, or without a GPU.
    """
    if cpu_offload and (meshes.world is None or meshes.world.device_type == "cpu"):
        raise UserError(
            "policy.dtensor_cfg.cpu_offload is true, but "
            + ("every rank holds the whole model" if meshes.world is None else "the model is on CPUs already")
            + "; it needs weights sharded over two GPUs or more: set it to false"
        )
    if meshes.world is None:
        if activation_checkpointing:
            moe_parallelizer.apply_ac(model)
        return model
    _patch_automodel()
    sizes = meshes.sizes
    moe_parallelizer.parallelize_model(
        model,
        meshes.world,
        meshes.moe,
        dp_axis_names=("dp_shard_cp",),
        cp_axis_name="cp",
        tp_axis_name=None,
        ep_axis_name="ep" if sizes.ep > 1 else None,
        ep_shard_axis_names=("ep_shard",) if sizes.ep > 1 else None,
        activation_checkpointing=activation_checkpointing,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy() if cpu_offload else None,
        model_parallelizer=type(model).parallelizer,  # type: ignore[attr-defined]
    )
    permute_without_transformer_engine(model)
    return model
