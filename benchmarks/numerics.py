"""Speed and memory of the rounding code, and its bits on this device. One run, one table.

python benchmarks/numerics.py                 on a GPU: bits of every kernel, bytes per second over the measured copy,
                                              speed against the eager and the compiled reference
python benchmarks/numerics.py --check         only the bits; exit 1 on the first kind of difference
python benchmarks/numerics.py --sweep         first try the launch shapes of every kernel, then the table with the best
python benchmarks/numerics.py --device cpu    reference against a naive loop, memory on a large tensor (--gigabytes 4)

A kernel's device time is the median of replays of a captured graph with a cold L2, so that no host time is in it; what
a call costs the host is a column of its own. Speed-ups compare ordinary calls with ordinary calls.
"""

import argparse
import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, not_negative, positive
from kernel_bits import GROUP, KV, STEPS, WEIGHT, check, in_processes, same, spec_of

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, fake_quant, quantize
from nemo_rl_dsv4.numerics.blockwise import reference_dequantize, reference_quantize
from nemo_rl_dsv4.numerics.fake_quant import reference_fake_quant
from nemo_rl_dsv4.numerics.rotary import inverse_rope_backward, inverse_rope_forward
from nemo_rl_dsv4.numerics.swiglu import swiglu_backward, swiglu_forward

TOKENS, HIDDEN, HEADS, HEAD, ROPE, WIDTH = 16384, 4096, 64, 512, 64, 2048  # V4-Flash


@dataclass
class Case:
    """One kernel at one shape: callables without arguments and the bytes that one pass must move.

    launch: the kernel's row in the table of launch shapes.
    """

    name: str
    launch: str
    kernel: Callable[[], object]
    reference: Callable[[], object]
    moved: int
    compile: bool = True


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def cases(device: str) -> list[Callable[[], Case]]:
    """Makers of the cases at V4-Flash shapes; each allocates when called, so that only one is in memory."""
    from nemo_rl_dsv4.numerics import fused

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def fake(launch: str, name: str, spec: QuantSpec, *shape: int, compiled: bool = True) -> Case:
        x = normal(*shape)
        moved = 2 * nbytes(x)
        return Case(name, launch, lambda: fake_quant(x, spec), lambda: reference_fake_quant(x, spec), moved, compiled)

    def to_bytes(name: str, *shape: int) -> Case:
        x = normal(*shape)

        def pair(q: Quantized) -> tuple[Tensor, Tensor]:
            return q.data, q.scale

        def kernel() -> tuple[Tensor, Tensor]:
            return pair(quantize(x, WEIGHT))

        return Case(
            name, "tiles_to_bytes", kernel, lambda: pair(reference_quantize(x, WEIGHT)), nbytes(x) * 3 // 2, False
        )

    def from_bytes(name: str, *shape: int) -> Case:
        q = quantize(normal(*shape), WEIGHT)
        bf16, moved = torch.bfloat16, 3 * nbytes(q.data)
        return Case(
            name, "bytes_to_tiles", lambda: dequantize(q, bf16), lambda: reference_dequantize(q, bf16), moved, False
        )

    def swiglu(launch: str, name: str) -> Case:
        gate, up = normal(TOKENS * 6, 2 * WIDTH).chunk(2, -1)
        if launch == "swiglu":
            ahead = (gate, up, GROUP, 10.0, STEPS)
            moved = 3 * nbytes(gate)
            return Case(name, launch, lambda: fused.swiglu_forward(*ahead), lambda: swiglu_forward(*ahead), moved)
        grad = normal(TOKENS * 6, WIDTH)
        back = (grad, gate, up, 10.0, STEPS)
        moved = 5 * nbytes(grad)
        return Case(name, launch, lambda: fused.swiglu_backward(*back), lambda: swiglu_backward(*back), moved)

    def rope(launch: str, name: str) -> Case:
        o = normal(TOKENS, HEADS, HEAD)
        angle = torch.rand(TOKENS, ROPE // 2, device=device) * 6.28
        turn = (o, angle.cos(), angle.sin())
        moved = 2 * nbytes(o, angle)
        if launch == "rope":
            ahead = (*turn, GROUP, 8)
            return Case(
                name, launch, lambda: fused.inverse_rope_forward(*ahead), lambda: inverse_rope_forward(*ahead), moved
            )
        return Case(
            name, launch, lambda: fused.inverse_rope_backward(*turn), lambda: inverse_rope_backward(*turn), moved
        )

    rocm = spec_of("vllm-rocm-gfx950", "linear.input")
    return [
        lambda: fake("groups", "activation 1x128 UE8M0, 16384x4096", GROUP, TOKENS, HIDDEN),
        lambda: fake("groups_float", "activation 1x128 float scale, 16384x4096", rocm, TOKENS, HIDDEN),
        lambda: fake("tiles", "weight 128x128 fake, 4096x4096", WEIGHT, HIDDEN, HIDDEN),
        lambda: fake("tiles", "weight 128x128 fake, 65536x4096", WEIGHT, 65536, HIDDEN),
        lambda: fake("tiles", "weight fake, 256 experts 2048x4096", WEIGHT, 256, WIDTH, HIDDEN, compiled=False),
        lambda: to_bytes("weight quantize, 256 experts 2048x4096", 256, WIDTH, HIDDEN),
        lambda: from_bytes("weight dequantize, 256 experts 2048x4096", 256, WIDTH, HIDDEN),
        lambda: fake("kv", "KV 1x64 keep 64, 16384x512", KV, TOKENS, HEAD),
        lambda: fake("kv", "KV 1x64 keep 64, 262144x512", KV, TOKENS * 16, HEAD),
        lambda: swiglu("swiglu", "SwiGLU + quantize, 98304x2048"),
        lambda: swiglu("swiglu_backward", "SwiGLU backward, 98304x2048"),
        lambda: rope("rope", "inverse RoPE + quantize, 16384x64x512"),
        lambda: rope("rope_backward", "RoPE backward, 16384x64x512"),
    ]


def milliseconds(call: Callable[[], object], rep: int = 100) -> float:
    """Median time of ``call`` on the GPU with a cold L2, over ``rep`` ms of calls."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=rep, return_mode="median"))  # pyright: ignore[reportArgumentType]


def device_milliseconds(call: Callable[[], object], rep: int = 100) -> float:
    """:func:`milliseconds` of a captured ``call``, without what launching it costs the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    result = milliseconds(graph.replay, rep)
    del kept
    return result


def host_microseconds(call: Callable[[], object], calls: int = 30) -> float:
    """What one call costs the host while the GPU lags behind."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return taken / calls * 1e6


def copy_rate(moved: int = 1 << 31) -> float:
    """Bytes per second of torch's device copy that reads and writes ``moved`` bytes together.

    An ordinary call, which costs the host little: captured, it becomes a memcpy node, which ran at 2.8 TB/s instead of
    4.2 at some sizes on an H200.
    """
    source = torch.empty(moved // 4, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    return 2 * nbytes(source) / milliseconds(lambda: target.copy_(source)) * 1e3


def compiled_time(case: Case) -> tuple[float | None, bool | None]:
    """(milliseconds, same bits) of torch.compile on the reference."""
    if not case.compile:
        return None, None
    torch._dynamo.reset()
    call = torch.compile(case.reference, dynamic=False)
    equal = same(call(), case.reference())
    return milliseconds(call), equal


def measure_gpu(compile_until: float, save: Callable[[list[dict]], None]) -> list[dict]:
    """One row a case; everything but the shape is measured here. torch.compile is left out after ``compile_until``."""
    from nemo_rl_dsv4.numerics.fused.shapes import SHAPES

    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {rate / 1e9:.0f} GB/s")
    print(f"{'':42s}{'us':>8s}{'of copy':>9s}{'of copy of':>11s}{'host':>6s}{'times':>7s}{'times':>9s}  bits as")
    print(
        f"{'kernel':42s}{'':8s}{'of 1 GiB':>9s}{'that size':>11s}{'us':>6s}{'eager':>7s}{'compile':>9s}  eager, compile"
    )
    table = []
    for make in cases("cuda"):
        case = make()
        equal = same(case.kernel(), case.reference())
        device = device_milliseconds(case.kernel)
        fused, eager = milliseconds(case.kernel), milliseconds(case.reference)
        compiled, compiled_equal = compiled_time(case) if time.monotonic() < compile_until else (None, None)
        row = {
            "kernel": case.name,
            "shape": asdict(SHAPES[case.launch]),
            "device_ms": device,
            "bytes": case.moved,
            "of_copy": case.moved / device * 1e3 / rate,
            "of_copy_of_that_size": case.moved / device * 1e3 / copy_rate(case.moved),
            "host_us": host_microseconds(case.kernel),
            "call_ms": fused,
            "speedup_eager": eager / fused,
            "speedup_compile": compiled / fused if compiled else None,
            "same_bits": equal,
            "compile_same_bits": compiled_equal,
        }
        table.append(row)
        ratio = f"{row['speedup_compile']:9.1f}" if compiled else " " * 9
        print(
            f"{case.name:42s}{device * 1e3:8.1f}{row['of_copy']:9.2f}{row['of_copy_of_that_size']:11.2f}"
            f"{row['host_us']:6.0f}{row['speedup_eager']:7.1f}{ratio}  {equal}, {compiled_equal}",
            flush=True,
        )
        save(table)
        del case
        torch.cuda.empty_cache()
    return table


def prepare(job: tuple[int, bool]) -> None:
    """Compiles a case's kernel at every launch shape, or its reference, into the caches on disk."""
    from nemo_rl_dsv4.numerics.fused.shapes import CANDIDATES, SHAPES

    index, reference = job
    case = cases("cuda")[index]()
    if reference and case.compile:
        torch.compile(case.reference, dynamic=False)()
    for shape in () if reference else CANDIDATES[case.launch]:
        SHAPES[case.launch] = shape
        case.kernel()
    torch.cuda.synchronize()


def sweep(with_compile: bool, workers: int) -> list[dict]:
    """Tries every kernel's launch shapes and leaves the best ones in the table of shapes; shares of the copy rate."""
    from nemo_rl_dsv4.numerics.fused.shapes import CANDIDATES, SHAPES

    makers = cases("cuda")
    jobs = [(index, False) for index in range(len(makers))]
    if with_compile:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        jobs += [(index, True) for index in range(len(makers))]
    in_processes(prepare, jobs, workers)
    rate = copy_rate()
    table, shares = [], {}
    for make in makers:
        case = make()
        rows = []
        for shape in CANDIDATES[case.launch]:
            SHAPES[case.launch] = shape
            share = case.moved / device_milliseconds(case.kernel, rep=20) * 1e3 / rate
            rows.append({"kernel": case.name, "launch": case.launch, **asdict(shape), "of_copy": share})
            shares.setdefault(case.launch, {}).setdefault(shape, []).append(share)
        table += rows
        best = sorted(rows, key=lambda row: -row["of_copy"])
        print(
            f"{case.name:42s}",
            "  ".join(
                f"{r['elements']}/{r['warps']}{'/reload' if r['reload'] else ''} {r['of_copy']:.3f}"
                for r in (*best[:4], best[-1])
            ),
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    for launch, found in shares.items():
        SHAPES[launch] = max(found, key=lambda shape: sum(found[shape]))
        print(f'    "{launch}": {SHAPES[launch]},')
    return table


def naive(x: Tensor, group: int) -> Tensor:
    """A loop over groups, the way a first version is written."""
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            part = x[row, start : start + group]
            scale = torch.exp2(torch.ceil(torch.log2(part.abs().max().clamp_min(1e-10) / 448)))
            y[row, start : start + group] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return y


def measure_cpu(gigabytes: float) -> list[dict]:
    """Reference against the loop, and the memory that quantizing one large tensor adds."""
    torch.set_num_threads(1)
    spec = QuantSpec(block=(1, 128), amax_floor=1e-10)
    x = torch.randn(4096, 128)
    started = time.perf_counter()
    loop = naive(x, 128)
    loop_s = time.perf_counter() - started
    times = []
    for _ in range(20):
        started = time.perf_counter()
        y = fake_quant(x, spec)
        times.append(time.perf_counter() - started)
    best = min(times)
    rows = int(gigabytes * 2**30 / 4 / 8192)
    big = torch.empty(rows, 8192).uniform_(-1, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    q = quantize(big, QuantSpec())
    seconds = time.perf_counter() - started
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - nbytes(q.data, q.scale)
    block_row = 128 * 8192 * 4
    row = {
        "fake_quant_4096x128_ms": best * 1e3,
        "speedup_over_loop": loop_s / best,
        "same_values_as_loop": torch.equal(loop, y),
        "quantize_gigabytes": gigabytes,
        "quantize_seconds": seconds,
        "work_memory_in_block_rows": extra / block_row,
    }
    print("\n".join(f"{k}: {v:.4g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()))
    return [row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="compare bits and stop")
    parser.add_argument("--sweep", action="store_true", help="first try the launch shapes, then measure with the best")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--compile-seconds", type=not_negative, default=3600.0, help="leave it out after so much of the run"
    )
    parser.add_argument(
        "--gigabytes", type=positive, default=4.0, help="size of the tensor of the CPU memory measurement"
    )
    parser.add_argument(
        "--workers", type=at_least(1), default=os.cpu_count() or 1, help="processes that compile kernels"
    )
    parser.add_argument("--json", type=Path, help="also write the tables here")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu")
    if options.json is not None and (options.json.is_dir() or not options.json.resolve().parent.is_dir()):
        parser.error(f"--json {options.json}: wanted a file in a folder that exists; make the folder first")
    compile_until = 0.0 if options.no_compile else time.monotonic() + options.compile_seconds
    tables: dict[str, list[dict]] = {}

    def save(name: str, table: list[dict]) -> None:
        tables[name] = table
        if options.json:
            options.json.write_text(json.dumps(tables, indent=1) + "\n")

    if options.device == "cpu":
        save("cpu", measure_cpu(options.gigabytes))
        return 0
    failed = check("cuda", options.workers)
    print(
        "bits: " + ("all equal" if not failed else "\n  ".join([f"{len(failed)} differences", *failed[:20]])),
        flush=True,
    )
    if not options.check:
        if options.sweep:
            save("sweep", sweep(not options.no_compile, options.workers))
        measure_gpu(compile_until, functools.partial(save, "kernels"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --gigabytes"))
