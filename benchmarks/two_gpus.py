"""Two training processes against one, over NCCL on two GPUs: the same numbers, and how much faster.

    python benchmarks/two_gpus.py                          # parity and speed of dp2ep2 and cp2ep2, about 2 minutes
    python benchmarks/two_gpus.py --parts parity --json
    python benchmarks/two_gpus.py --device cpu             # gloo, a tiny model: the code path only

All processes hold the same random weights of a model with the mini recipes' layers, half as wide. Parity:
log-probabilities, loss, gradient norm, each gradient (|g - g1| / |g1|, largest and median over parameters) and the
bytes of the sharded FP8 export.

Variants: `float32` rounds nothing (dense attention), so that what remains is the order of additions. `qat` is BF16
over float32 master weights, every rounding site on, `attn: tilelang`, `experts: torch_mm`. There
a last-bit difference moves a value to the next FP8 code, in whatever order the same machine adds. So `qat` has rows of
one GPU against itself: `one, rows rotated` with other rows beside each other in a micro-batch; `one, half
micro-batches`, whose matrix products have other shapes and so other orders of additions, as those of cp2ep2 have; and
`one, sums off by 1e-7`, the same on any device: products get a random error of that size before they are rounded.
A layout that computes the same differs by about as much as the last two.

Speed, of `qat`: median seconds of a step of one GPU and of two, with the same batch (strong scaling) and with twice the
sequences (weak scaling). A pass has as many tokens on each GPU in every layout: under context parallelism it takes
twice as many sequences. Efficiency is tokens a second over twice those of one GPU.

One GPU and each layout are processes of their own. They check parity beside each other (most of the time is compiling
kernels, which are few: every sequence has one length) and then measure speed one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import parity
import vllm_refit
from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import LossSettings
from nemo_rl_dsv4.mismatch.summation import OtherSums
from nemo_rl_dsv4.model.build import CPU_BACKEND
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, stored_codes
from nemo_rl_dsv4.numerics.alignment import SWITCHES as ALIGNMENT
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit.export import export_weights

LAYOUTS = ("dp2ep2", "cp2ep2")
ONE, ROTATED, HALVED = "one", "one, rows rotated", "one, half micro-batches"
PERTURBED = "one, sums off by 1e-7"
ITSELF = (ROTATED, HALVED, PERTURBED)
PROFILE = "vllm-hopper"
Found = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What every process is told.

    Attributes:
        device: cuda or cpu.
        attn, experts, dispatcher: AutoModel's backends in `qat`; `float32` takes dense attention and a loop.
        rows, length: sequences of a batch and their tokens.
        micro_batch: sequences of a pass.
        repeats: timed steps.
    """

    device: str
    attn: str
    experts: str
    dispatcher: str
    rows: int
    length: int
    micro_batch: int
    repeats: int

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        if self.device == "cpu":
            return parity.CONFIG
        return {k: v for k, v in vllm_refit.CONFIG.items() if k not in ("quantization_config", "expert_dtype")}


def spec(setting: Setting, sizes: ParallelSizes, variant: str) -> PolicySpec:
    """Settings of a rank."""
    qat = variant == "qat"
    backend = {**CPU_BACKEND}
    if qat:
        backend |= {"attn": setting.attn, "experts": setting.experts}
        backend["dispatcher"] = setting.dispatcher if sizes.ep > 1 else "torch"
    return PolicySpec(
        checkpoint=None,
        hf_config=setting.config,
        sizes=sizes,
        profile=PROFILE,
        fake_quant=dict.fromkeys(SWITCHES, qat),
        alignment={} if qat else dict.fromkeys(ALIGNMENT, False),
        precision="bfloat16" if qat else "float32",
        backend=backend,
        micro_batch_size=setting.micro_batch,
        logprob_batch_size=setting.micro_batch,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5}},
        max_grad_norm=1.0,
        logprob_chunk_size=256,
        device=setting.device,
    )


def weights_of(model: torch.nn.Module, experts: int) -> None:
    """The same weights in every process, by name: activations near one, nothing at its initial value."""
    for index, (name, value) in enumerate(sorted(model.state_dict().items())):
        generator = torch.Generator(value.device).manual_seed(index)
        if not value.is_floating_point():
            value.copy_(vllm_refit.hash_table(value.shape, experts, generator))
            continue
        drawn = torch.randn(value.shape, generator=generator, device=value.device)
        is_gain = "norm" in name or name.endswith("scale")
        value.copy_(1.0 + 0.1 * drawn if is_gain else drawn * value.shape[-1] ** -0.5)


def build(setting: Setting, sizes: ParallelSizes, variant: str) -> PolicyWorker:
    """A worker with `weights_of` its model, whatever the layout."""
    from nemo_rl_dsv4.policy import spec as spec_module

    original = spec_module.build_model

    def seeded(*args: Any, **kwargs: Any):
        model = original(*args, **kwargs)
        weights_of(model, setting.config["n_routed_experts"])
        return model

    spec_module.build_model = seeded
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return build_worker(spec(setting, sizes, variant))
    finally:
        spec_module.build_model = original


def batch(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Rows of one length (TileLang compiles for each), the last tenth of the last row padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((rows,), length)
    lengths[-1] = length - length // 10
    inside = torch.arange(length) < lengths.unsqueeze(1)
    return {
        "input_ids": torch.where(inside, torch.randint(3, vocab, (rows, length), generator=generator), 1),
        "input_lengths": lengths,
        "token_mask": (inside & (torch.arange(length) >= 20)).float(),
        "sample_mask": torch.ones(rows),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous(),
    }


def own_rows(whole: dict[str, torch.Tensor], sizes: ParallelSizes, rank: int) -> dict[str, torch.Tensor]:
    """The rows of this rank's data-parallel index."""
    share = len(whole["input_ids"]) // sizes.dp
    first = rank // sizes.cp * share
    return {key: value[first : first + share] for key, value in whole.items()}


def train(worker: PolicyWorker, data: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> Found:
    """One optimizer step."""
    return worker.train(
        data,
        ClippedPGLoss(LossSettings(reference_policy_kl_penalty=0.0)),
        global_valid_seqs=len(whole["input_ids"]),
        global_valid_tokens=whole["token_mask"][:, 1:].sum().item(),
    )


def numbers(worker: PolicyWorker, setting: Setting, sizes: ParallelSizes, rank: int, *, rotated: bool = False) -> Found:
    """Log-probabilities, export, loss and gradients of one step, whole on every rank, on the CPU."""
    whole = batch(setting.rows, setting.length, setting.config["vocab_size"])
    turned = max(1, setting.micro_batch // 2) if rotated else 0
    if rotated:
        whole = {key: value.roll(turned, 0) for key, value in whole.items()}
    data = own_rows(whole, sizes, rank)
    data["generation_logprobs"] = data["prev_logprobs"] = worker.get_logprobs(data)["logprobs"]
    refresh_quantized(worker.model)
    stream = export_weights(worker.model.state_dict(), PROFILE, stored=stored_codes(worker.model))
    exported = {name: tensor.contiguous().view(torch.uint8).cpu().clone() for name, tensor in stream if tensor.numel()}
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in worker.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                gradients[name] = whole_gradient.cpu()

    hook = worker.optimizer.register_step_pre_hook(keep)
    out = train(worker, data, whole)
    hook.remove()
    logprobs = parity.gather_rows(data["prev_logprobs"], sizes)
    return {
        "logprobs": logprobs.roll(-turned, 0),
        "loss": float(parity.sum_over_data_ranks(out["loss"], sizes)),
        "grad_norm": out["grad_norm"],
        "gradients": gradients,
        "exported": exported,
    }


def compare(found: Found, wanted: Found) -> dict[str, float]:
    """Errors of one layout against one process.

    Raises:
        RuntimeError: other gradients or other tensors exported.
    """
    for key in ("gradients", "exported"):
        if found[key].keys() != wanted[key].keys():
            raise RuntimeError(f"{key} of other tensors: {sorted(found[key].keys() ^ wanted[key].keys())[:5]}")
    gradients = [parity.relative(found["gradients"][name], value) for name, value in wanted["gradients"].items()]
    difference = (found["logprobs"] - wanted["logprobs"]).abs()
    differing = [int((found["exported"][name] != value).sum()) for name, value in wanted["exported"].items()]
    return {
        "logprobs_max": float(difference.max()),
        "logprobs_mean": float(difference.mean()),
        "loss": abs(found["loss"] - wanted["loss"]) / max(abs(wanted["loss"]), 1e-30),
        "grad_norm": abs(found["grad_norm"] - wanted["grad_norm"]) / wanted["grad_norm"],
        "gradient_max": max(gradients),
        "gradient_median": statistics.median(gradients),
        "export_bytes_differing": sum(differing),
        "export_bytes": sum(value.numel() for value in wanted["exported"].values()),
    }


def seconds_of_steps(worker: PolicyWorker, setting: Setting, sizes: ParallelSizes, rank: int) -> list[float]:
    """Seconds of each timed step, as this rank sees it, after two that are not counted."""
    whole = batch(setting.rows, setting.length, setting.config["vocab_size"])
    data = own_rows(whole, sizes, rank)
    data["generation_logprobs"] = data["prev_logprobs"] = torch.zeros(data["input_ids"].shape)
    times = []
    for step in range(2 + setting.repeats):
        synchronize(sizes)
        started = time.perf_counter()
        train(worker, data, whole)
        synchronize(sizes)
        if step > 1:
            times.append(time.perf_counter() - started)
    return times


def synchronize(sizes: ParallelSizes) -> None:
    """All work of all ranks is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if sizes.world > 1:
        dist.barrier()


def loads(setting: Setting, layout: str) -> dict[str, Setting]:
    """Scaling -> batch of a layout on two GPUs; of one GPU: `strong` alone."""
    return {"strong": setting} | ({} if layout == ONE else {"weak": replace(setting, rows=2 * setting.rows)})


def run_rank(rank: int, world: int, folder: str, layout: str, turns: list[str], parts: list[str], setting: Setting):
    """One process of a layout; what it found goes into `folder`. `turns` is the order in which layouts are timed."""
    torch.set_num_threads(1 if setting.device == "cpu" else 4)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    here = Path(folder)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous-{layout}", rank=rank, world_size=world
        )
    sizes = ParallelSizes(1) if layout == ONE else parity.parse_sizes(layout)
    for variant in variants_of("parity") if "parity" in parts else ():
        found = numbers(build(setting, sizes, variant), setting, sizes, rank)
        leave(here, f"parity-{variant}-{layout}", found, rank)
        if layout == ONE and variant == "qat":
            again = numbers(build(setting, sizes, variant), setting, sizes, rank, rotated=True)
            leave(here, f"parity-{variant}-{ROTATED}", again, rank)
            halved = replace(setting, micro_batch=max(1, setting.micro_batch // 2))
            again = numbers(build(halved, sizes, variant), halved, sizes, rank)
            leave(here, f"parity-{variant}-{HALVED}", again, rank)
            with OtherSums(1e-7):
                again = numbers(build(setting, sizes, variant), setting, sizes, rank)
            leave(here, f"parity-{variant}-{PERTURBED}", again, rank)
            del again
        del found
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    (here / f"checked-{layout}-{rank}").touch()
    if "speed" in parts:
        # As many tokens a pass on each GPU, whatever the layout: half the launches for half the sequence otherwise.
        worker = build(replace(setting, micro_batch=setting.micro_batch * sizes.cp), sizes, "qat")
        worlds = {name: 1 if name == ONE else parity.parse_sizes(name).world for name in turns}
        names = [f"checked-{name}-{number}" for name in turns for number in range(worlds[name])]
        await_files(here, [*names, *(f"speed-qat-{name}.pt" for name in turns[: turns.index(layout)])])
        measured = {}
        for scaling, load in loads(setting, layout).items():
            if setting.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = seconds_of_steps(worker, load, sizes, rank)
            peak = torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else 0.0
            measured[scaling] = {"times": times, "tokens": load.rows * load.length, "peak_gib": peak}
        leave(here, f"speed-qat-{layout}", measured, rank)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def leave(here: Path, name: str, found: Any, rank: int) -> None:
    """Rank 0 puts a result where the parent looks for it, whole at once."""
    if rank == 0:
        torch.save(found, here / f"{name}.part")
        (here / f"{name}.part").rename(here / f"{name}.pt")
        print(f"# {name} at {time.strftime('%X')}", file=sys.stderr, flush=True)


def await_files(here: Path, names: list[str]) -> None:
    """Sleep until all of them exist; the parent ends this process if one will never come."""
    while not all((here / name).exists() for name in names):
        time.sleep(0.1)


def variants_of(part: str) -> tuple[str, ...]:
    """Variants that a part runs."""
    return ("float32", "qat") if part == "parity" else ("qat",)


def run(parts: list[str], layouts: list[str], setting: Setting) -> Iterator[Found]:
    """Yield one row a layout, variant and scaling, as soon as it is known.

    Raises:
        UserError: a process refused its settings.
    """
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    turns = [ONE, *layouts]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        started: list[Any] = []
        try:
            for layout in turns:
                world = 1 if layout == ONE else parity.parse_sizes(layout).world
                arguments = (world, folder, layout, turns, parts, setting)
                started.append(
                    mp.start_processes(
                        run_rank, args=arguments, nprocs=world, join=False, daemon=True, start_method="spawn"
                    )
                )
            yield from rows_of(Path(folder), parts, layouts, started)
            for processes in started:
                while not processes.join():
                    pass
        except mp.ProcessRaisedException as error:
            raise refusal(error) from None
        finally:  # none may write into the folder any more when it is deleted
            for process in [process for processes in started for process in processes.processes]:
                process.terminate()
                process.join()


def rows_of(here: Path, parts: list[str], layouts: list[str], started: list[Any]) -> Iterator[Found]:
    """The rows of `run`, from what the started processes leave in a folder."""
    for variant in variants_of("parity") if "parity" in parts else ():
        base = result(here, f"parity-{variant}-{ONE}", started)
        for layout in [*(ITSELF if variant == "qat" else ()), *layouts]:
            found = result(here, f"parity-{variant}-{layout}", started)
            yield {"part": "parity", "variant": variant, "layout": layout, **compare(found, base)}
    if "speed" in parts:
        base = result(here, f"speed-qat-{ONE}", started)["strong"]
        rate = base["tokens"] / statistics.median(base["times"])
        for layout in [ONE, *layouts]:
            for scaling, found in result(here, f"speed-qat-{layout}", started).items():
                yield speed_row(layout, scaling, found, rate)


def refusal(error: mp.ProcessRaisedException) -> Exception:
    """The `UserError` that a process raised, or the error as it is: its last line is the process's own."""
    kind, _, message = str(error).rstrip().rpartition("\n")[2].partition(": ")
    return UserError(message) if kind == f"{UserError.__module__}.{UserError.__qualname__}" else error


def result(here: Path, name: str, started: list[Any]) -> Any:
    """What a layout left under a name, as soon as it is there.

    Raises:
        Exception: a process raised one.
        RuntimeError: all processes have ended without it.
    """
    path = here / f"{name}.pt"
    while not path.exists():
        ended = [processes.join(timeout=0.1) for processes in started]
        if all(ended) and not path.exists():
            raise RuntimeError(f"all processes have ended without {path.name}")
    return torch.load(path)


def speed_row(layout: str, scaling: str, found: Found, rate_of_one: float) -> Found:
    """Median, spread, tokens a second and efficiency."""
    median = statistics.median(found["times"])
    world = 1 if layout == ONE else parity.parse_sizes(layout).world
    rate = found["tokens"] / median
    return {
        "part": "speed",
        "layout": layout,
        "scaling": scaling if world > 1 else "",
        "tokens": found["tokens"],
        "seconds": median,
        "spread": max(found["times"]) - min(found["times"]),
        "tokens_per_second": rate,
        "efficiency": rate / (world * rate_of_one),
        "peak_gib": found["peak_gib"],
    }


def read_options() -> tuple[argparse.Namespace, Setting]:
    """Options of the command line, and what they tell every process.

    Raises:
        UserError: a layout that cannot run them.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=("parity", "speed"), default=["parity", "speed"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--attn", choices=("tilelang", "sdpa"), help="default: tilelang, sdpa on CPUs")
    parser.add_argument("--experts", choices=("torch_mm", "torch"), help="default: torch_mm, torch on CPUs")
    parser.add_argument("--dispatcher", default="torch", choices=("torch", "deepep", "uccl_ep"))
    parser.add_argument("--rows", type=at_least(1), default=8, help="sequences of a batch (8)")
    parser.add_argument("--length", type=at_least(1), help="tokens of a sequence (1024; 256 on CPUs)")
    parser.add_argument("--micro-batch", type=at_least(1), default=4)
    parser.add_argument("--repeats", type=at_least(1), default=4)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    if cpu and args.attn == "tilelang":
        parser.error("--attn tilelang runs on GPUs; wanted sdpa with --device cpu")
    if cpu and args.dispatcher != "torch":
        parser.error(f"--dispatcher {args.dispatcher} runs on GPUs; wanted torch with --device cpu")
    setting = Setting(
        args.device,
        args.attn or ("sdpa" if cpu else "tilelang"),
        args.experts or ("torch" if cpu else "torch_mm"),
        args.dispatcher,
        args.rows,
        args.length or (256 if cpu else 1024),
        args.micro_batch,
        args.repeats,
    )
    layouts = parity.check_layouts(args.layouts, rows=args.rows, experts=setting.config["n_routed_experts"])
    wanted = max(sizes.world for sizes in layouts.values())
    if not cpu and torch.cuda.device_count() < wanted:
        parser.error(f"{torch.cuda.device_count()} GPUs here; wanted {wanted}, or --device cpu")
    if setting.attn == "tilelang" and importlib.util.find_spec("tilelang") is None:
        parser.error("--attn tilelang needs the tilelang package; wanted it installed, or --attn sdpa")
    if "parity" in args.parts and not batch(setting.rows, setting.length, 160)["token_mask"].any():
        parser.error(f"--length {setting.length}: the first 20 tokens of a row are not trained on; wanted a longer one")
    return args, setting


def main() -> int:
    """Print a line a row."""
    args, setting = read_options()
    print(f"# {setting}, torch {torch.__version__}", file=sys.stderr)
    for row in run(args.parts, args.layouts, setting):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --rows, --length or --micro-batch"))
