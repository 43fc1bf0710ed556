"""Export from sharded weights: every rank gets the bytes that one process would send, and moves bytes, not values."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.numerics import QuantSpec, quantize
from nemo_rl_dsv4.refit import SourceScales, export_weights, sharded, sharded_run
from nemo_rl_dsv4.refit.buckets import fill_buckets
from nemo_rl_dsv4.refit.report import Stream
from nemo_rl_dsv4.refit.transport.protocol import run_dry

State = dict[str, torch.Tensor]
WORLD = 4


@pytest.fixture
def ranks() -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Runs a function on four ranks, which are threads of this process with real collectives between them."""
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def run(function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * WORLD

        def one(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    yield run
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    _uninstall_threaded_pg()


def shard(state: State, expert_parallel: int) -> State:
    """As AutoModel does it: stacks over experts, and over dim 1 within an expert; other parameters over rows."""
    flat = init_device_mesh("cpu", (WORLD,))
    grid = init_device_mesh("cpu", (WORLD // expert_parallel, expert_parallel), mesh_dim_names=("ep_shard", "ep"))
    out = {}
    for key, value in state.items():
        if value.dim() == 3:
            out[key] = distribute_tensor(value, grid, [Shard(1), Shard(0)])
        elif value.is_floating_point():
            out[key] = distribute_tensor(value, flat, [Replicate() if "bias" in key else Shard(0)])
        else:
            out[key] = value
    return out


def same(left: Stream, right: Stream) -> bool:
    pairs = zip(left, right, strict=True)
    return all(n == m and a.dtype == b.dtype and torch.equal(raw(a), raw(b)) for (n, a), (m, b) in pairs)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.fixture
def wide_state() -> State:
    """Weights large enough that shards are whole blocks: 512 rows over four ranks, experts cut at 128 and 256."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.layers.0.self_attn.wq_b.weight": (512, 256),
        "model.layers.0.self_attn.wkv.weight": (320, 256),
        "model.layers.0.mlp.experts.gate_and_up_projs": (4, 256, 2 * 192),
        "model.layers.0.mlp.experts.down_projs": (4, 192, 256),
    }
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("profile", "expert_parallel"),
    [("vllm-hopper", 1), ("vllm-hopper", 2), ("vllm-hopper", 4), ("deepseek-reference", 2), ("bf16", 2)],
)
def test_every_rank_sends_the_bytes_of_one_process(
    ranks: Any, training_state: State, wide_state: State, profile: str, expert_parallel: int
) -> None:
    """A gathered stack of all experts does not fit beside the model; the bytes must not depend on the layout."""
    small = {k: v for k, v in training_state.items() if not k.startswith("model.layers.") or ".layers.2." in k}
    for state in (small, wide_state):
        whole = list(export_weights(state, profile))
        results = ranks(lambda rank, state=state: list(export_weights(shard(state, expert_parallel), profile)))
        for stream in results:
            assert not isinstance(stream, BaseException), stream
            assert same(stream, whole)


def test_codes_travel_and_memory_is_one_expert(ranks: Any, wide_state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned shards are quantized first: about one byte a weight is sent, never a stack of all experts."""
    sent: list[tuple[torch.dtype, int]] = []

    def broadcast(buffer: torch.Tensor, **kwargs: Any) -> None:
        sent.append((buffer.dtype, buffer.numel() * buffer.element_size()))
        dist.broadcast(buffer, **kwargs)

    monkeypatch.setattr(sharded, "dist", SimpleNamespace(broadcast=broadcast))  # anything else is an error
    experts = {key: value for key, value in wide_state.items() if value.dim() == 3}
    streams = ranks(lambda rank: list(export_weights(shard(experts, 4), "vllm-hopper")))
    assert all(same(stream, export_weights(experts, "vllm-hopper")) for stream in streams)
    of_one_expert = 3 * 256 * 192
    assert {dtype for dtype, _ in sent} == {torch.uint8}
    assert len(sent) == 4 * WORLD
    assert max(size for _, size in sent) < 1.01 * of_one_expert


def test_source_scales_reach_the_rank_that_quantizes(ranks: Any, wide_state: State) -> None:
    stream = dict(export_weights(wide_state, "vllm-hopper"))
    doubled = {n.removesuffix("scale") + "weight": 2 * t for n, t in stream.items() if n.endswith(".scale")}
    for key in wide_state:  # small codes only: every block is exact under twice its scale
        wide_state[key] = wide_state[key].sign()
    scales = SourceScales((name, torch.full_like(scale, 2.0**-3)) for name, scale in doubled.items())
    whole = list(export_weights(wide_state, "vllm-hopper", source_scales=scales))
    assert all(bool((t == 2.0**-3).all()) for n, t in whole if n.endswith(".scale"))
    for stream in ranks(lambda rank: list(export_weights(shard(wide_state, 2), "vllm-hopper", source_scales=scales))):
        assert same(stream, whole)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.layers.0.mlp.experts.down_projs", r"layers\.0\.ffn\.experts\.2\.w2\.weight: block \[0, 0\]"),
        ("model.layers.0.self_attn.wq_b.weight", r"layers\.0\.attn\.wq_b\.weight: block \[0, 0\]"),
    ],
)
def test_every_rank_raises_for_a_nan_on_one(ranks: Any, wide_state: State, key: str, message: str) -> None:
    """One rank that raised alone left the others waiting in a collective until its timeout."""
    index = (2, 5, 7) if wide_state[key].dim() == 3 else (5, 7)
    wide_state[key][index] = float("nan")
    for error in ranks(lambda rank: list(export_weights(shard(wide_state, 4), "vllm-hopper"))):
        assert isinstance(error, UserError)
        assert re.search(message, str(error))


def test_sharding_over_two_axes_is_refused(ranks: Any, wide_state: State) -> None:
    def attempt(rank: int) -> Any:
        grid = init_device_mesh("cpu", (2, 2))
        key = "model.layers.0.mlp.experts.down_projs"
        return list(export_weights({key: distribute_tensor(wide_state[key], grid, [Shard(0), Shard(0)])}, "bf16"))

    for error in ranks(attempt):
        assert isinstance(error, UserError)
        assert "cannot export placements" in str(error)


def stacks(experts: int) -> State:
    """Experts of whole blocks, 98,304 codes each."""
    generator = torch.Generator().manual_seed(experts)
    prefix = "model.layers.5.mlp.experts"
    return {
        f"{prefix}.gate_and_up_projs": torch.randn(experts, 256, 256, generator=generator),
        f"{prefix}.down_projs": torch.randn(experts, 128, 256, generator=generator),
    }


def own_experts(state: State, options: dict[str, Any]) -> dict[str, Any]:
    """Codes of training for the experts that a rank holds, as `stored_codes` finds them."""
    stored: dict[str, StoredCodes] = {}
    for key, stack in state.items():
        local, first = stack.to_local(), dist.get_rank() * len(stack.to_local())  # type: ignore[attr-defined]
        codes = [quantize(part, QuantSpec()) for part in local.chunk(2 if "gate" in key else 1, -1)]
        data = torch.cat([part.data.view(torch.uint8) for part in codes], -1).view(torch.float8_e4m3fn)
        stored[key] = StoredCodes(data, torch.cat([part.scale for part in codes], -1), QuantSpec())
        for name in AUTOMODEL.official_names(key, len(stack)):
            slot = AUTOMODEL.slot(name)
            assert slot.expert is not None
            if first <= slot.expert < first + len(local):
                one = replace(slot, expert=slot.expert - first)
                stored[name] = StoredCodes(*(AUTOMODEL.view(t, one) for t in stored[key][:2]), QuantSpec())
    return {**options, "stored": stored}


@pytest.mark.parametrize("with_codes", [False, True])
@pytest.mark.parametrize("experts_a_piece", [1, 2, 100])
def test_experts_of_a_rank_travel_together(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, experts_a_piece: int, with_codes: bool
) -> None:
    """One broadcast a piece, whatever each rank does with the pieces: fill buckets, or only take part."""
    size = 3 * 256 * 128
    monkeypatch.setattr(sharded_run, "PIECE_BYTES", experts_a_piece * (size + 24) + 16)
    sent: list[int] = []

    def broadcast(buffer: torch.Tensor, **kwargs: Any) -> None:
        sent.append(buffer.numel())
        dist.broadcast(buffer, **kwargs)

    monkeypatch.setattr(sharded_run, "dist", SimpleNamespace(broadcast=broadcast))
    state = stacks(12)
    plain = dict(export_weights(state, "vllm-hopper"))
    doubled = {name: 2 * scale for name, scale in plain.items() if name.endswith(".scale")}
    for stack in state.values():  # every block is exact under twice its scale
        stack.copy_(stack.sign() * 0.5)
    scales = SourceScales((name[:-5] + "weight", torch.full_like(scale, 2.0**-9)) for name, scale in doubled.items())
    want = list(export_weights(state, "vllm-hopper", source_scales=scales))
    assert all(bool((t == 2.0**-9).all()) for n, t in want if n.endswith(".scale"))
    capacity = max(2, experts_a_piece) * 2 * size

    def one(rank: int) -> Any:
        mine = shard(state, 4)
        options = {"source_scales": SourceScales(scales.items())}
        export = export_weights(mine, "vllm-hopper", **own_experts(mine, options) if with_codes else options)
        if rank != 1:
            return list(export)
        memory = torch.empty(capacity, dtype=torch.uint8)
        return [(n, t.clone()) for b in fill_buckets(export, lambda _: memory) for n, t in b.items()]

    for stream in ranks(one):
        assert not isinstance(stream, BaseException), stream
        assert same(stream, want)
    assert len(sent) == WORLD * {1: 12, 2: 8, 100: 4}[experts_a_piece]


def test_a_sender_that_gives_up_lets_the_others_finish(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine refused a bucket in the middle of a layer; the other ranks still waited for its pieces."""
    monkeypatch.setattr(sharded_run, "PIECE_BYTES", 1)
    state = {**stacks(8), "model.norm.weight": torch.ones(4)}

    def one(rank: int) -> Any:
        export = export_weights(shard(state, 4), "vllm-hopper")
        if rank != 2:
            return list(export)
        memory = torch.empty(200_000, dtype=torch.uint8)
        next(fill_buckets(export, lambda _: memory))
        run_dry(export)
        return None

    results = ranks(one)
    assert [result is None for result in results] == [False, False, True, False]
    assert all(same(result, export_weights(state, "vllm-hopper")) for result in results if result is not None)


def test_every_rank_names_the_block_of_a_nan_among_experts(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_run, "PIECE_BYTES", 1)
    state = stacks(8)
    state["model.layers.5.mlp.experts.gate_and_up_projs"][5, 200, 128 + 7] = torch.inf

    def one(rank: int) -> Any:
        export = export_weights(shard(state, 4), "vllm-hopper")
        if rank:
            return list(export)
        memory = torch.empty(400_000, dtype=torch.uint8)
        try:
            return list(fill_buckets(export, lambda _: memory))
        finally:
            run_dry(export)

    for error in ranks(one):
        assert isinstance(error, UserError)
        assert "layers.5.ffn.experts.5.w3.weight: block [0, 1] holds a NaN" in str(error)
