"""Runs one rank's forward pass of the whole model on fake tensors, and one block of each kind backward.

Everything is AutoModel's own code with the rank's tokens, positions and share of the experts, except for what exists
only between ranks or in a GPU library. That is replaced by something with the same shapes, dtypes and saved tensors:
context-parallel gathers, token dispatch with balanced routing, and (for `attn: tilelang`) the sparse attention and
indexer kernels. Parameters are whole, as FSDP would have gathered them, in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from nemo_automodel.components.models.deepseek_v4 import cp as v4_cp
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.moe.layers import MoE
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.planning.fake_world import fake_world
from nemo_rl_dsv4.planning.live_bytes import LiveBytes
from nemo_rl_dsv4.policy.parallel import ParallelSizes, create_meshes


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one transformer block on one rank.

    Attributes:
        kind: `ratio R`, with `hashed` where experts are looked up by token id.
        count: blocks of this kind in the model.
        input: the block's input, all that activation checkpointing keeps.
        saved: alive between forward and backward without checkpointing, output included.
        peak: largest amount alive in forward and backward of this block alone, its gradients included.
        forward_peak: the same for a forward without gradients.
    """

    kind: str
    count: int
    input: int
    saved: int
    peak: int
    forward_peak: int


@dataclass(frozen=True)
class ForwardCheck:
    """What ran: local shapes of ids and logits, operators' blocks, and their memory."""

    ids_shape: tuple[int, int]
    hidden_shape: tuple[int, ...]
    logits_shape: tuple[int, ...]
    logits_dtype: str
    blocks_run: int
    blocks: tuple[BlockMemory, ...]


def check_forward(
    hf_config: Mapping[str, Any],
    sizes: ParallelSizes,
    *,
    rows: int,
    length: int,
    attn: str = "sdpa",
    dispatcher: str = "torch",
    dtype: torch.dtype = torch.bfloat16,
    on_block: Callable[[], None] = lambda: None,
) -> ForwardCheck:
    """Run the model's forward for the last context-parallel rank's share of `rows` rows of `length` tokens.

    Args:
        hf_config: official-style configuration.
        sizes: ranks on each axis.
        rows: sequences of the micro batch.
        length: tokens of a row; a multiple of the context-parallel size.
        attn: `backend.attn`; tilelang's kernels are replaced by their shapes.
        dispatcher: `backend.dispatcher`; decides whether the group's tokens are gathered.
        dtype: compute dtype.
        on_block: called after every block, for a progress display.
    """
    backend = {**CPU_BACKEND, "attn": attn}
    with fake_world(sizes.world, rank=sizes.cp - 1), _shapes_only():
        meshes = create_meshes(sizes)  # holds real tensors: made before tensors become fake
        cp_group = meshes.cp_group
        model = build_model(
            automodel_config(hf_config),
            backend=backend,
            dtype=dtype,
            routing_weight_after_down=True,
            device=torch.device("meta"),
        )
        with FakeTensorMode(allow_non_fake_inputs=True), _NothingFound():
            _make_fake(model)
            return _run(model, hf_config, sizes, rows, length, dispatcher, cp_group, on_block)


def _make_fake(model: torch.nn.Module) -> None:
    """Move a model from the meta device to fake tensors of a CPU, which more of torch accepts."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _run(
    model: Any,
    hf_config: Mapping[str, Any],
    sizes: ParallelSizes,
    rows: int,
    length: int,
    dispatcher: str,
    cp_group: Any,
    on_block: Callable[[], None],
) -> ForwardCheck:
    kinds = _kinds(hf_config)
    seen: dict[str, tuple[torch.nn.Module, dict[str, Any]]] = {}
    blocks_run = 0

    def hook(kind: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            nonlocal blocks_run
            call = {**kwargs, **({"x": args[0]} if args else {})}
            if (output.shape, output.dtype) != (call["x"].shape, call["x"].dtype):
                raise UserError(
                    f"block of kind {kind!r} returns {tuple(output.shape)} {output.dtype} for an input of "
                    f"{tuple(call['x'].shape)} {call['x'].dtype}; wanted the same, check policy.hf_config_overrides"
                )
            seen.setdefault(kind, (module, call))
            blocks_run += 1
            on_block()

        return after

    for kind, block in zip(kinds, model.model.layers.values(), strict=True):
        moe = block.mlp
        assert isinstance(moe, MoE)
        share: Any = _LocalExperts(moe.experts, sizes.ep, gathers=dispatcher == "torch")
        moe.experts = share
        block.register_forward_hook(hook(kind), with_kwargs=True)
    local = length // sizes.cp
    start = (sizes.cp - 1) * local
    ids = torch.empty(rows, local, dtype=torch.long)
    padding = torch.empty(rows, local, dtype=torch.bool)
    positions = torch.arange(start, start + local).expand(rows, -1)
    kwargs: dict[str, Any] = {"padding_mask": padding}
    if cp_group is not None:
        kwargs |= {"_dsv4_cp_group": cp_group, "position_ids": positions}
    # Sinkhorn iterations repeat the same shapes: one stands for all in the pass over every block.
    mixers = [module for module in model.modules() if isinstance(module, v4_layers.DeepseekV4HyperConnection)]
    for mixer in mixers:
        mixer.hc_sinkhorn_iters = 1
    with torch.no_grad():
        logits = model(ids, **kwargs).logits
    for mixer in mixers:
        mixer.hc_sinkhorn_iters = hf_config["hc_sinkhorn_iters"]
    blocks = tuple(_measure(kind, kinds.count(kind), *seen[kind]) for kind in dict.fromkeys(kinds))
    return ForwardCheck(
        ids_shape=(rows, local),
        hidden_shape=tuple(seen[kinds[0]][1]["x"].shape),
        logits_shape=tuple(logits.shape),
        logits_dtype=str(logits.dtype).removeprefix("torch."),
        blocks_run=blocks_run,
        blocks=blocks,
    )


def _kinds(hf_config: Mapping[str, Any]) -> list[str]:
    hashed = hf_config["num_hash_layers"]
    ratios = hf_config["compress_ratios"][: hf_config["num_hidden_layers"]]
    return [f"ratio {ratio}{', hashed' if index < hashed else ''}" for index, ratio in enumerate(ratios)]


def _measure(kind: str, count: int, block: torch.nn.Module, call: dict[str, Any]) -> BlockMemory:
    block._forward_hooks.clear()
    x = call["x"].detach().requires_grad_(True)
    call = {**call, "x": x}
    existing = [tensor for tensor in tree_leaves(list(call.values())) if isinstance(tensor, torch.Tensor)]
    existing += [*block.parameters(), *block.buffers()]
    existing += [
        buffer for module in call.values() if isinstance(module, torch.nn.Module) for buffer in module.buffers()
    ]
    with LiveBytes(existing) as live:
        output = block(**call)
        saved = live.now
        output.sum().backward()
        peak = live.peak
    del output
    block.zero_grad(set_to_none=True)
    with torch.no_grad(), LiveBytes(existing) as scoring:
        block(**call)
        forward_peak = scoring.peak
    return BlockMemory(kind, count, x.numel() * x.element_size(), saved, peak, forward_peak)


class _NothingFound(TorchDispatchMode):
    """Answers 0 where the model reads a value off a tensor without any: it only asks for image tokens and bad ids."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


class _LocalExperts(torch.nn.Module):
    """The rank's share of the experts under balanced routing: as many rows arrive as are sent."""

    def __init__(self, whole: Any, ranks: int, *, gathers: bool) -> None:
        super().__init__()
        self.ranks, self.gathers = ranks, gathers
        self.gate_and_up = torch.nn.Parameter(_first(whole.gate_and_up_projs, ranks))
        self.down = torch.nn.Parameter(_first(whole.down_projs, ranks))

    def forward(
        self, x_TH: torch.Tensor, token_mask_T: torch.Tensor, weights_TK: torch.Tensor, indices_TK: torch.Tensor
    ) -> torch.Tensor:
        tokens, hidden = x_TH.shape
        top_k, experts = indices_TK.shape[1], self.down.shape[0]
        assert weights_TK.shape == (tokens, top_k) and token_mask_T.shape == (tokens,)
        rows = tokens * top_k
        if self.gathers and self.ranks > 1:
            everyone = x_TH.repeat(self.ranks, 1)
            arrived = everyone[:tokens].repeat_interleave(top_k, 0)
        else:
            arrived = x_TH.repeat_interleave(top_k, 0)
        each = math.ceil(rows / experts)
        arrived = F.pad(arrived, (0, 0, 0, each * experts - rows)).view(experts, each, hidden)
        gate, up = torch.bmm(arrived, self.gate_and_up.to(x_TH.dtype)).chunk(2, dim=-1)
        inner = F.silu(gate.float().clamp(max=10.0)) * up.float().clamp(-10.0, 10.0)
        left = torch.bmm(inner.to(x_TH.dtype), self.down.to(x_TH.dtype)).flatten(0, 1)[:rows]
        return (left.float() * weights_TK.reshape(-1, 1)).view(tokens, top_k, hidden).sum(dim=1).to(x_TH.dtype)


def _first(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.empty(
        (parameter.shape[0] // ranks, *parameter.shape[1:]), dtype=torch.float32, device=parameter.device
    )


class _SparseAttention(torch.autograd.Function):
    """Shapes of the TileLang kernel: it keeps q, keys, indices, output and one log-sum per head for its backward."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(q)
        log_sum = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, kv, sinks, indices.to(torch.int32), output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, kv, sinks, *_ = ctx.saved_tensors
        # Key gradients are summed over heads in float32 by atomic additions, then cast.
        key_sums = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
        return torch.empty_like(q), key_sums.to(kv.dtype), torch.empty_like(sinks), None


class _Gather(torch.autograd.Function):
    """Shapes of the context-parallel gather: `ranks` pieces, their concatenation, and back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
        ctx.dim, ctx.length = dim, tensor.shape[dim]
        return torch.cat([torch.empty_like(tensor) for _ in range(ranks)], dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].contiguous().narrow(ctx.dim, 0, ctx.length).contiguous(), None, None


def _gather(tensor: Any, *, dim: int, cp_group: Any) -> Any:
    if tensor is None or not v4_cp.dsv4_cp_enabled(cp_group):
        return tensor
    return _Gather.apply(tensor, dim % tensor.ndim, v4_cp.dsv4_cp_size(cp_group))


def _sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float, **_: Any
) -> torch.Tensor:
    return _SparseAttention.apply(q, kv, sinks.float(), topk_idxs)


def _indexer_scores(q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if kwargs["backend"] != "tilelang":
        return _torch_indexer_scores(q, pooled_kv, weights, **kwargs)
    return torch.empty((*q.shape[:2], pooled_kv.shape[1]), dtype=torch.float32, device=q.device)


_torch_indexer_scores = v4_layers.dsv4_indexer_scores


@contextmanager
def _shapes_only() -> Iterator[None]:
    """Replace what needs other ranks or a GPU by stand-ins of the same shapes, and put everything back afterwards."""
    swaps = [
        (v4_layers, "dsv4_cp_all_gather", _gather),
        (v4_layers, "dsv4_cp_all_gather_metadata", _gather),
        (v4_cp, "dsv4_cp_all_gather", _gather),
        (v4_cp, "dsv4_cp_all_gather_metadata", _gather),
        (v4_layers, "dsv4_sparse_attention", _sparse_attention),
        (v4_layers, "dsv4_indexer_scores", _indexer_scores),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in swaps]
    for module, name, stand_in in swaps:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
