"""BF16 weights to engine-ready FP8: speed against device copy, memory, and the same work in plain torch beside it.

    python benchmarks/refit.py                       one layer of DeepSeek-V4-Flash on a GPU (about 35 GB, a minute)
    python benchmarks/refit.py --experts 8 --hidden 512 --width 256 --repeats 2      also runs on a CPU

Three ways, all from a stack of BF16 experts as training holds them to FP8 stacks and scales as an engine holds them:
  direct      quantize into a bucket, copy it to the engine's buffers, the next bucket into the same memory
  buckets     the same with a manifest, checksums of what is sent, and a comparison with them on arrival
  plain       tensor by tensor in torch: amax, scale, divide, cast, copy
GB/s counts the bytes of the BF16 input; copy is torch's copy_ of the same input, counted alike. Extrapolation:
  seconds = parameters * 2 bytes / GPUs / (GB/s of `buckets`)  +  parameters * 1 byte / (link GB/s)
the first term is quantization on the GPU that holds the weights, the second every engine's whole copy of the codes over
its link, of which `--link` GB/s is assumed, not measured.

On a GPU it also says where the time goes: phases by CUDA events and on the host, kernels by torch's profiler, and the
quantization, the copy and the checksum of one bucket alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, positive

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.refit.buckets import fill_buckets, write_buckets
from nemo_rl_dsv4.refit.export import export_weights
from nemo_rl_dsv4.refit.manifest import Entry, read_bucket
from nemo_rl_dsv4.refit.placement import Placement

LAYER = "model.layers.3.mlp.experts"
FLASH_PARAMETERS = 284e9
State = dict[str, torch.Tensor]


class EngineBuffers:
    """Stacks as a rollout engine holds them: codes and float32 scales of w13 and w2."""

    def __init__(self, experts: int, hidden: int, width: int, device: str) -> None:
        def stack(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.empty(experts, rows, cols, dtype=torch.float8_e4m3fn, device=device)
            return codes, torch.empty(experts, rows // 128, cols // 128, device=device)

        self.w13, self.w13_scale = stack(2 * width, hidden)
        self.w2, self.w2_scale = stack(hidden, width)
        self._bytes = [tensor.view(torch.uint8).flatten() for tensor in self.tensors()]
        self._places: dict[str, tuple[int, int]] = {}
        for expert in range(experts):
            for part, first, pieces in (("w1", 0, 2), ("w3", 1, 2), ("w2", 0, 1)):
                for kind, which in (("weight", 0), ("scale", 1)):
                    stack_number = which + (2 if part == "w2" else 0)
                    size = self._bytes[stack_number].numel() // experts // pieces
                    name = f"layers.3.ffn.experts.{expert}.{part}.{kind}"
                    self._places[name] = stack_number, (expert * pieces + first) * size

    def write(self, buffer: torch.Tensor, placed: Iterable[Placement | Entry]) -> int:
        """Copy a bucket to where the engine wants it, neighbours on both sides at once; returns the bytes."""
        runs: list[tuple[int, int, int, int]] = []  # stack, first byte here and there, bytes
        last, start, goal, end, aim = -1, 0, 0, 0, 0
        for stack, target, offset, size in sorted((*self._places[p.name], p.offset, p.bytes) for p in placed):
            if stack != last or offset != end or target != aim:
                runs.append((last, start, goal, end - start))
                last, start, goal = stack, offset, target
            end, aim = offset + size, target + size
        runs.append((last, start, goal, end - start))
        for stack, offset, target, size in runs[1:]:
            self._bytes[stack][target : target + size].copy_(buffer[offset : offset + size])
        return sum(size for _, _, _, size in runs)

    def place(self, name: str) -> torch.Tensor:
        """View of the buffer where one official tensor belongs."""
        expert, part, kind = name.split(".experts.")[1].split(".")
        codes, scale = (self.w2, self.w2_scale) if part == "w2" else (self.w13, self.w13_scale)
        target = (codes if kind == "weight" else scale)[int(expert)]
        if part == "w2":
            return target
        half = target.shape[0] // 2
        return target[:half] if part == "w1" else target[half:]

    def tensors(self) -> list[torch.Tensor]:
        return [self.w13, self.w13_scale, self.w2, self.w2_scale]


class Phases:
    """Milliseconds by phase: of the GPU between marks in its queue, and of the host between the same marks."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[tuple[str, float, Any]] = []

    def mark(self, phase: str) -> None:
        """What was done since the last mark was this phase."""
        event = torch.cuda.Event(enable_timing=True) if self._cuda else None
        if event is not None:
            event.record()
        self._marks.append((phase, time.perf_counter(), event))

    def milliseconds(self) -> dict[str, dict[str, float]]:
        if self._cuda:
            torch.cuda.synchronize()
        found: dict[str, dict[str, float]] = {}
        for (_, before, first), (phase, after, second) in zip(self._marks, self._marks[1:], strict=False):
            row = found.setdefault(phase, {"gpu": 0.0, "host": 0.0})
            row["host"] += (after - before) * 1e3
            row["gpu"] += first.elapsed_time(second) if first is not None else 0.0
        return found


def direct(state: State, engine: EngineBuffers, capacity: int, phases: Phases | None = None) -> int:
    """Returns the bytes moved to the engine."""
    mark = phases.mark if phases else lambda _: None
    mark("start")
    buffer = torch.empty(capacity, dtype=torch.uint8, device=engine.w2.device)
    moved = 0
    for bucket in fill_buckets(export_weights(state, "vllm-hopper"), lambda _: buffer):
        mark("encode")
        moved += engine.write(bucket.buffer, bucket.placed)
        mark("copy to engine")
    return moved


def buckets(state: State, engine: EngineBuffers, capacity: int, phases: Phases | None = None) -> int:
    mark = phases.mark if phases else lambda _: None
    mark("start")
    buffer = torch.empty(capacity, dtype=torch.uint8, device=engine.w2.device)
    moved = 0
    for manifest, filled in write_buckets(export_weights(state, "vllm-hopper"), lambda _: buffer, version=1):
        mark("encode and checksum")
        for _ in read_bucket(manifest, filled):
            pass
        mark("compare checksums")
        engine.write(filled, manifest.entries)
        mark("copy to engine")
        moved += manifest.bytes
    return moved


def plain(state: State, engine: EngineBuffers, capacity: int) -> int:
    """What a refit without any of this does, one official tensor after the other."""
    del capacity
    moved = 0
    for key, stack in state.items():
        for expert in range(stack.shape[0]):
            whole = stack[expert].t()
            parts = {"w2": whole} if "down" in key else dict(zip(("w1", "w3"), whole.chunk(2), strict=True))
            for part, value in parts.items():
                rows, cols = value.shape
                blocks = value.float().reshape(rows // 128, 128, cols // 128, 128)
                amax = blocks.abs().amax((1, 3))
                mantissa, exponent = torch.frexp(amax / 448.0)
                scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
                scale = torch.where(amax == 0, 1.0, scale)
                codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(rows, cols)
                stem = f"layers.3.ffn.experts.{expert}.{part}"
                engine.place(f"{stem}.weight").copy_(codes)
                engine.place(f"{stem}.scale").copy_(scale)
                moved += codes.numel() + 4 * scale.numel()
    return moved


def measure(work: Callable[[], Any], device: str, repeats: int) -> tuple[float, float]:
    """Median seconds, and the largest extra memory in bytes (0 on a CPU)."""
    cuda = device == "cuda"
    work()
    seconds, extra = [], 0
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2], float(extra)


def copy_rate(source: torch.Tensor, device: str, repeats: int) -> float:
    """GB/s of input of torch's copy_."""
    target = torch.empty_like(source)
    seconds, _ = measure(lambda: target.copy_(source), device, max(repeats, 5))
    return source.numel() * 2 / seconds / 1e9


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def stack(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for expert in made:
            expert.normal_(0.0, 0.02, generator=generator)
        return made

    experts, hidden, width = options.experts, options.hidden, options.width
    state = {
        f"{LAYER}.gate_and_up_projs": stack(experts, hidden, 2 * width),
        f"{LAYER}.down_projs": stack(experts, width, hidden),
    }
    source = sum(tensor.numel() * 2 for tensor in state.values())
    capacity = int(options.bucket_gb * 2**30)
    engine, results = EngineBuffers(experts, hidden, width, device), {}
    copy = copy_rate(state[f"{LAYER}.down_projs"], device, options.repeats)
    reference: list[torch.Tensor] | None = None
    for work in (direct, buckets, plain):
        seconds, extra = measure(lambda work=work: work(state, engine, capacity), device, options.repeats)
        made = [tensor.clone() for tensor in engine.tensors()]
        if reference is None:
            reference = made
        equal = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(reference, made, strict=True))
        del made
        moved = work(state, engine, capacity)
        results[work.__name__] = {
            "seconds": seconds,
            "gb_per_s": source / seconds / 1e9,
            "of_copy": source / seconds / 1e9 / copy,
            "extra_mib": extra / 2**20,
            "extra_over_a_bucket_mib": (extra - capacity) / 2**20,
            "moved_over_bf16": moved / source,
            "equal": equal,
        }
    on_gpu = explain(state, engine, capacity, copy) if device == "cuda" else {}
    rate = results["buckets"]["gb_per_s"] * 1e9
    per_gpu = FLASH_PARAMETERS * 2 / options.gpus / rate
    link = FLASH_PARAMETERS / (options.link * 1e9)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "input_gb": source / 1e9,
        "copy_gb_per_s": copy,
        "ways": results,
        "extrapolated": {
            "parameters": FLASH_PARAMETERS,
            "gpus": options.gpus,
            "quantize_seconds": per_gpu,
            "link_gb_per_s": options.link,
            "link_seconds": link,
            "seconds": per_gpu + link,
        },
        "phases_ms": {way.__name__: phases_of(way, state, engine, capacity, device) for way in (direct, buckets)},
        **on_gpu,
    }


def phases_of(way: Callable[..., int], state: State, engine: EngineBuffers, capacity: int, device: str) -> Any:
    phases = Phases(device)
    way(state, engine, capacity, phases)
    return phases.milliseconds()


def explain(state: State, engine: EngineBuffers, capacity: int, copy: float) -> dict[str, Any]:
    """Parts of the work alone, GB/s of BF16 input (or of bytes moved), and the kernels of one pass."""
    from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL
    from nemo_rl_dsv4.numerics import QuantSpec
    from nemo_rl_dsv4.numerics.fused.shapes import CANDIDATES
    from nemo_rl_dsv4.numerics.fused.stacks import quantize_stack
    from nemo_rl_dsv4.refit.checksum import start_range_checksums
    from nemo_rl_dsv4.refit.expert_run import ExpertRun, layout_of

    layout = layout_of("layers.3.ffn.experts", state, AUTOMODEL, QuantSpec())
    assert layout is not None
    run, count = ExpertRun.of(layout, state, AUTOMODEL, QuantSpec()), layout.fitting(capacity)
    buffer = torch.empty(capacity, dtype=torch.uint8, device="cuda")
    damaged = torch.zeros(1, dtype=torch.int32, device="cuda")
    alone: dict[str, float] = {}

    def rate(work: Callable[[], Any], size: float) -> float:
        work()
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return size / sorted(times)[2] / 1e6

    for label, stack in (("w13", run.gate_up.values[:count]), ("w2", run.down.values[:count])):
        rows, columns = stack.shape[1:]
        codes = buffer[: stack.numel()].view(stack.shape)
        scale = torch.empty(count, rows // 128, columns // 128, device="cuda")
        straight = stack.transpose(1, 2).contiguous().view(stack.shape)
        for shape in CANDIDATES["stacks_turned"]:
            for order, values in (("turned", stack), ("straight", straight)):
                work = partial(quantize_stack, values, run.down.spec, codes, scale, damaged, shape=shape)
                found = rate(work, 2 * stack.numel())
                alone[f"quantize {label} {order}, {shape.warps} warps{', reload' * shape.reload}"] = found
    alone["copy of a bucket"] = rate(
        lambda: engine._bytes[0][:capacity].copy_(buffer[: engine._bytes[0].numel()]),
        min(capacity, engine._bytes[0].numel()),
    )
    placed = run.encode(0, count, buffer, 0, damaged)
    ranges = [(p.offset, p.bytes) for p in placed]
    alone["checksums of a bucket"] = rate(
        lambda: start_range_checksums(buffer, ranges), sum(size for _, size in ranges)
    )
    start = time.perf_counter()
    for _ in range(10):
        run.encode(0, count, buffer, 0, damaged)
    queued = (time.perf_counter() - start) / 10
    torch.cuda.synchronize()
    return {
        "alone_gb_per_s": alone,
        "alone_of_copy": {name: value / copy for name, value in alone.items() if name.startswith("quantize")},
        "host_ms_to_queue_a_bucket": queued * 1e3,
        "experts_in_a_bucket": count,
        "kernels": {
            way.__name__: kernels_of(lambda way=way: way(state, engine, capacity)) for way in (direct, buckets)
        },
    }


def kernels_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Launches of one pass and the ten kernels that take longest, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    rows = [row for row in rows if row.self_device_time_total > 0]
    return {
        "launches": sum(row.count for row in rows),
        "busy_ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "longest": {row.key[:60]: [row.count, round(row.self_device_time_total / 1e3, 3)] for row in rows[:10]},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=at_least(1), default=256)
    parser.add_argument("--hidden", type=at_least(1), default=4096, help="multiple of 128")
    parser.add_argument("--width", type=at_least(1), default=2048, help="of an expert, multiple of 128")
    parser.add_argument("--bucket-gb", type=positive, default=1.0)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--gpus", type=at_least(1), default=128)
    parser.add_argument("--link", type=positive, default=100.0, help="GB/s into each engine, an assumption")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name, value in (("--hidden", options.hidden), ("--width", options.width)):
        if value % 128:
            parser.error(f"{name} {value}: wanted a multiple of 128, the block of FP8 weights")
    found = run(options)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['device']}, torch {found['torch']}, {found['input_gb']:.2f} GB BF16")
        print(f"device copy {found['copy_gb_per_s']:.0f} GB/s of input")
        for name, way in found["ways"].items():
            print(
                f"{name:8s} {way['seconds'] * 1e3:8.1f} ms {way['gb_per_s']:7.0f} GB/s = {way['of_copy']:.2f} of copy, "
                f"extra {way['extra_mib']:.0f} MiB ({way['extra_over_a_bucket_mib']:+.0f} over a bucket), "
                f"moved {way['moved_over_bf16']:.3f} of BF16, equal {way['equal']}"
            )
        print("extrapolated", json.dumps(found["extrapolated"]))
        for way, phases in found["phases_ms"].items():
            for phase, spent in phases.items():
                print(
                    f"{way:8s} {phase:24s} {spent['gpu']:8.2f} ms between marks on the GPU, "
                    f"{spent['host']:8.2f} ms host"
                )
        for name, value in found.get("alone_gb_per_s", {}).items():
            of_copy = found["alone_of_copy"].get(name)
            print(f"alone    {name:44s} {value:7.0f} GB/s" + (f" = {of_copy:.2f} of copy" if of_copy else ""))
        if "kernels" in found:
            print(
                f"host     {found['host_ms_to_queue_a_bucket']:.2f} ms to queue {found['experts_in_a_bucket']} experts"
            )
            for way, kernels in found["kernels"].items():
                print(f"{way:8s} {kernels['launches']} launches, GPU busy {kernels['busy_ms']:.2f} ms")
                for name, (times, spent) in kernels["longest"].items():
                    print(f"         {spent:8.3f} ms in {times:4d} x {name}")
    return 0 if all(way["equal"] for way in found["ways"].values()) else 1


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --experts, --hidden or --width"))
