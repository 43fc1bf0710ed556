"""BF16 weights to engine-ready FP8: speed against device copy, memory, and the same work in plain torch beside it.

    python benchmarks/refit.py                       one layer of DeepSeek-V4-Flash on a GPU (25 GB)
    python benchmarks/refit.py --experts 8 --hidden 512 --width 256 --repeats 2      also runs on a CPU

Three ways, all from a stack of BF16 experts as training holds them to FP8 stacks and scales as an engine holds them:
  direct      export, and copy the tensors into the engine's buffers, a bucket at a time
  buckets     export, pack into buckets with checksums, check them, copy into the engine's buffers
  plain       tensor by tensor in torch: amax, scale, divide, cast, copy
GB/s counts the bytes of the BF16 input; copy is torch's copy_ of the same input, counted alike. Extrapolation:
  seconds = parameters * 2 bytes / GPUs / (GB/s of `buckets`)  +  parameters * 1 byte / (link GB/s)
the first term is quantization on the GPU that holds the weights, the second every engine's whole copy of the codes over
its link, of which `--link` GB/s is assumed, not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from nemo_rl_dsv4.refit.buckets import numbered_buckets, pack_buckets
from nemo_rl_dsv4.refit.export import export_weights
from nemo_rl_dsv4.refit.manifest import read_bucket, write_bucket

LAYER = "model.layers.3.mlp.experts"
FLASH_PARAMETERS = 284e9


class EngineBuffers:
    """Stacks as a rollout engine holds them: codes and float32 scales of w13 and w2."""

    def __init__(self, experts: int, hidden: int, width: int, device: str) -> None:
        def stack(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.empty(experts, rows, cols, dtype=torch.float8_e4m3fn, device=device)
            return codes, torch.empty(experts, rows // 128, cols // 128, device=device)

        self.w13, self.w13_scale = stack(2 * width, hidden)
        self.w2, self.w2_scale = stack(hidden, width)

    def write_all(self, items: list[tuple[str, torch.Tensor]]) -> None:
        """Copy official tensors to their places: one launch for all codes and one for all scales."""
        for codes in (True, False):
            some = [(self.place(n), t) for n, t in items if (t.dtype != torch.float32) == codes]
            if some:
                targets, sources = (list(side) for side in zip(*some, strict=True))
                if codes:
                    targets, sources = ([t.view(torch.uint8) for t in side] for side in (targets, sources))
                torch._foreach_copy_(targets, sources)

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


def direct(state: dict[str, torch.Tensor], engine: EngineBuffers, capacity: int) -> int:
    """Returns the bytes moved to the engine."""
    moved = 0
    for items in pack_buckets(export_weights(state, "vllm-hopper"), capacity):
        engine.write_all(items)
        moved += sum(tensor.numel() * tensor.element_size() for _, tensor in items)
        items.clear()
    return moved


def buckets(state: dict[str, torch.Tensor], engine: EngineBuffers, capacity: int) -> int:
    buffer = torch.empty(capacity, dtype=torch.uint8, device=engine.w2.device)
    moved = 0
    for index, items, last in numbered_buckets(export_weights(state, "vllm-hopper"), capacity):
        manifest = write_bucket(items, buffer, version=1, index=index, last=last)
        items.clear()
        engine.write_all(list(read_bucket(manifest, buffer)))
        moved += manifest.bytes
    return moved


def plain(state: dict[str, torch.Tensor], engine: EngineBuffers, capacity: int) -> int:
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
            "moved_over_bf16": moved / source,
            "equal": equal,
        }
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
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096, help="multiple of 128")
    parser.add_argument("--width", type=int, default=2048, help="of an expert, multiple of 128")
    parser.add_argument("--bucket-gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--link", type=float, default=100.0, help="GB/s into each engine, an assumption")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = run(options)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['device']}, torch {found['torch']}, {found['input_gb']:.2f} GB BF16")
        print(f"device copy {found['copy_gb_per_s']:.0f} GB/s of input")
        for name, way in found["ways"].items():
            print(
                f"{name:8s} {way['seconds'] * 1e3:8.1f} ms {way['gb_per_s']:7.0f} GB/s = {way['of_copy']:.2f} of copy, "
                f"extra {way['extra_mib']:.0f} MiB, moved {way['moved_over_bf16']:.3f} of BF16, equal {way['equal']}"
            )
        print("extrapolated", json.dumps(found["extrapolated"]))
    return 0 if all(way["equal"] for way in found["ways"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
