"""Routed experts over expert-parallel ranks: the dispatchers against all experts in one process. One table.

    python benchmarks/dispatch.py --dispatchers torch deepep         # two GPUs, V4-Flash's expert sizes
    python benchmarks/dispatch.py --device cpu                       # gloo, small: the torch dispatcher's code path

Each rank has tokens of its own. The reference computes them on the rank itself with all experts' weights, without any
communication. Errors are |x - reference| / |reference| of the output, and of the gradients of the input, the routing
weights and the expert weights (the reference's summed over ranks), largest over ranks. Times are medians of forward and
of forward with backward (CUDA events); the reference's row is the floor: the same products without dispatch. A
dispatcher that cannot run here gets a row that says why, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, positive

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.known_models import FLASH
from nemo_rl_dsv4.policy.dispatcher import check_dispatcher, permute_without_transformer_engine

WEIGHTS = ("gate_and_up_projs", "down_projs")
Row = dict[str, Any]


def make_experts(options: argparse.Namespace, dispatcher: str, device: torch.device) -> torch.nn.Module:
    """The routed experts of one V4 layer with all weights, the same on every rank."""
    small = {"num_attention_heads": 4, "head_dim": 80, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_lora_rank": 64,
             "o_groups": 2, "index_head_dim": 32, "index_n_heads": 4}  # fmt: skip
    config = {
        **FLASH,
        **small,
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 0,
        "vocab_size": 128,
        "hidden_size": options.hidden,
        "moe_intermediate_size": options.width,
        "n_routed_experts": options.experts,
        "num_experts_per_tok": options.top_k,
    }
    backend = {**CPU_BACKEND, "experts": "torch_mm" if device.type == "cuda" else "torch", "dispatcher": dispatcher}
    model = build_model(
        automodel_config(config),
        backend=backend,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        routing_weight_after_down=True,
        seed=0,
        device=device,
    )
    experts = next(m for m in model.modules() if hasattr(m, WEIGHTS[0]))
    with torch.no_grad():
        for index, name in enumerate(WEIGHTS):
            weight = getattr(experts, name)
            generator = torch.Generator(device).manual_seed(index)
            drawn = torch.randn(weight.shape, generator=generator, device=device)
            weight.copy_(drawn * weight.shape[1] ** -0.5)
    return experts


class Tokens:
    """One rank's tokens and routes: x [n, H], mask [n], weights [n, K], indices [n, K]; a tenth is padding."""

    def __init__(self, options: argparse.Namespace, rank: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(100 + rank)
        n, dtype = options.tokens, torch.bfloat16 if device.type == "cuda" else torch.float32
        self.x = torch.randn(n, options.hidden, generator=generator, device=device).to(dtype).requires_grad_()
        scores = torch.rand(n, options.experts, generator=generator, device=device)
        chosen, self.indices = scores.topk(options.top_k, dim=-1)
        self.weights = (chosen / chosen.sum(-1, keepdim=True)).detach().requires_grad_()
        self.mask = torch.arange(n, device=device) < n - n // 10
        self.upstream = torch.randn(n, options.hidden, generator=generator, device=device).to(dtype)

    def forward(self, experts: torch.nn.Module) -> torch.Tensor:
        """[n, H]."""
        return experts(self.x, self.mask, self.weights, self.indices)

    def both(self, experts: torch.nn.Module) -> torch.Tensor:
        """Forward and backward."""
        out = self.forward(experts)
        out.backward(self.upstream * self.mask.unsqueeze(-1))
        return out

    def clear(self, experts: torch.nn.Module) -> None:
        """No gradients."""
        self.x.grad = self.weights.grad = None
        experts.zero_grad(set_to_none=True)

    def results(self, experts: torch.nn.Module, local: slice) -> dict[str, torch.Tensor]:
        """Output of real tokens, and gradients; of expert weights those of this rank's experts."""
        self.clear(experts)
        out = self.both(experts)
        assert self.x.grad is not None
        assert self.weights.grad is not None
        found = {"output": out[self.mask], "x": self.x.grad[self.mask], "weights": self.weights.grad[self.mask]}
        for name in WEIGHTS:
            gradient = getattr(experts, name).grad
            if isinstance(gradient, DTensor):
                found[name] = gradient.to_local()
            else:
                dist.all_reduce(gradient)
                found[name] = gradient[local]
        return {name: value.detach().float().clone() for name, value in found.items()}


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds on this rank, ranks started together."""
    times = []
    for step in range(3 + repeats):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            elapsed = begin.elapsed_time(end)
        else:
            started = time.perf_counter()
            run()
            elapsed = (time.perf_counter() - started) * 1e3
        if step >= 3:
            times.append(elapsed)
    return statistics.median(times)


def measure(name: str, experts: torch.nn.Module, tokens: Tokens, options: argparse.Namespace) -> Row:
    """Times of one dispatcher on this rank."""
    device = tokens.x.device

    def forward() -> None:
        with torch.no_grad():
            tokens.forward(experts)

    def both() -> None:
        tokens.clear(experts)
        tokens.both(experts)

    return {
        "dispatcher": name,
        "forward_ms": timed(forward, device, options.repeats),
        "both_ms": timed(both, device, options.repeats),
    }


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest over ranks of |found - wanted| / |wanted|; NaN stays NaN."""
    value = ((found - wanted).norm() / wanted.norm()).to(torch.float64).reshape(1)
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return float(torch.cat(parts).max())


def run_rank(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank; rank 0 writes the rows."""
    cuda = options.device == "cuda"
    torch.set_num_threads(4 if cuda else 1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank)
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    trace = (Path(folder) / f"trace{rank}.txt").open("w", encoding="utf-8")
    faulthandler.dump_traceback_later(max(options.deadline - time.time() - 3, 1), file=trace)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{folder}/join", rank=rank, world_size=world
    )
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))
    tokens = Tokens(options, rank, device)
    share = options.experts // world
    local = slice(rank * share, (rank + 1) * share)
    rows: list[Row] = []
    reference = make_experts(options, "torch", device)
    wanted = tokens.results(reference, local)
    rows.append(measure("none: all experts on each rank", reference, tokens, options))
    write_rows(rows, rank, folder)
    del reference
    for name in options.dispatchers:
        try:
            report = check_dispatcher({"dispatcher": name, "experts": "torch_mm"}, ranks=world, gpus_per_node=world)
            rows.append(with_dispatcher(name, mesh, tokens, wanted, local, options) | {"found": report.line()})
        except (UserError, RuntimeError, AssertionError, ImportError, AttributeError, TypeError) as failure:
            rows.append({"dispatcher": name, "error": f"{type(failure).__name__}: {failure}"[:2000]})
        write_rows(rows, rank, folder)
        if "error" in rows[-1] and not rows[-1]["error"].startswith(UserError.__name__):
            break  # the ranks may be at different places now
    if not any("error" in row for row in rows):
        dist.destroy_process_group()
    os._exit(0)  # DeepEP's buffers can hang in their destructors


def write_rows(rows: list[Row], rank: int, folder: str) -> None:
    """Leave what this rank has for the parent, whole at any time."""
    part = Path(folder) / f"rows{rank}.part"
    part.write_text(json.dumps(rows), encoding="utf-8")
    part.rename(Path(folder) / f"rows{rank}.json")


def last_place(folder: Path, rank: int) -> str:
    """Innermost Python frames of the main thread of a rank that did not end in time; empty for one that did."""
    path = folder / f"trace{rank}.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    threads = [part for part in text.split("\n\n") if "File" in part]
    frames = [line.strip() for line in threads[-1].splitlines() if line.startswith("  File")] if threads else []
    return " < ".join(frame.removeprefix("File ") for frame in frames[:4])


def run(options: argparse.Namespace) -> list[Row]:
    """Rows of rank 0; if ranks fail or fall silent, the last row says so and what another rank found."""
    options.deadline = time.time() + options.limit
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            run_rank,
            args=(options.world, folder, options),
            nprocs=options.world,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        assert ranks is not None
        failure = None
        try:
            while not ranks.join(timeout=0.5):
                if time.time() > options.deadline:
                    failure = f"no end after {options.limit} s"
                    break
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            failure = " ".join(str(error).split())[-2000:]
        found = {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank in range(options.world)
            if (path := Path(folder) / f"rows{rank}.json").exists()
        }
        places = {rank: place for rank in range(options.world) if (place := last_place(Path(folder), rank))}
        for process in ranks.processes:
            if process is not None:
                process.kill()
    rows = found.get(0, [])
    if failure is not None:
        errors = [f"rank {rank} was in {place}" for rank, place in places.items()]
        errors += [row["error"] for own in found.values() for row in own if "error" in row]
        names = [row["dispatcher"] for row in rows]
        unfinished = next((name for name in options.dispatchers if name not in names), "the end")
        rows = [*rows, {"dispatcher": unfinished, "error": "; ".join([failure, *errors])}]
    return rows


def with_dispatcher(
    name: str, mesh: Any, tokens: Tokens, wanted: dict[str, torch.Tensor], local: slice, options: argparse.Namespace
) -> Row:
    """Errors and times of one dispatcher."""
    from nemo_automodel.components.moe.parallelizer import ExpertParallel

    experts = make_experts(options, name, tokens.x.device)
    parallelize_module(module=experts, device_mesh=mesh, parallelize_plan=ExpertParallel())
    permute_without_transformer_engine(experts)
    found = tokens.results(experts, local)
    errors = {f"error_{key}": error(found[key], value) for key, value in wanted.items()}
    again = tokens.results(experts, local)
    same = all(torch.equal(again[key], value) for key, value in found.items())
    return {**measure(name, experts, tokens, options), **errors, "repeats_bit_for_bit": same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dispatchers", nargs="+", choices=("torch", "deepep", "uccl_ep"), default=["torch"])
    parser.add_argument("--world", type=at_least(1), default=2, help="ranks, each with a GPU of its own")
    parser.add_argument("--tokens", type=at_least(1), help="of each rank (8192; 64 on CPUs)")
    parser.add_argument("--hidden", type=at_least(1), help="(4096; 64 on CPUs)")
    parser.add_argument("--width", type=at_least(1), help="of an expert (2048; 64 on CPUs)")
    parser.add_argument("--experts", type=at_least(1), help="all ranks together (32; 8 on CPUs)")
    parser.add_argument("--top-k", type=at_least(1), default=6)
    parser.add_argument("--repeats", type=at_least(1), default=20)
    parser.add_argument("--limit", type=positive, default=120.0, help="seconds after which the rows so far are printed")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    for key, sizes in {"tokens": (8192, 64), "hidden": (4096, 64), "width": (2048, 64), "experts": (32, 8)}.items():
        setattr(options, key, getattr(options, key) or sizes[cpu])
    if options.experts % options.world:
        parser.error(f"--experts {options.experts} does not divide over {options.world} ranks")
    if options.top_k > options.experts:
        parser.error(f"--top-k {options.top_k}: wanted at most the {options.experts} experts (--experts)")
    if not cpu and torch.cuda.device_count() < options.world:
        parser.error(f"{torch.cuda.device_count()} GPUs here; wanted {options.world}, or --device cpu")
    rows = run(options)
    if not options.json:
        print("# " + ", ".join(f"{key} {value}" for key, value in vars(options).items()), f"torch {torch.__version__}")
    for row in rows:
        cells = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(json.dumps(row) if options.json else "  ".join(cells))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --tokens, --hidden, --width or --experts"))
