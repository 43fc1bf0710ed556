"""Speed and memory of the rounding code, and its bits on this device. One run, one table.

python benchmarks/numerics.py                 on a GPU: bits of every kernel, bytes per second over the measured copy,
                                              speed against the eager and the compiled reference
python benchmarks/numerics.py --check         only the bits; exit 1 on the first kind of difference
python benchmarks/numerics.py --sweep         tile sizes and warps of every kernel
python benchmarks/numerics.py --device cpu    reference against a naive loop, memory on a large tensor (--gigabytes 4)
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl_dsv4.numerics import PROFILES, Quantized, QuantSpec, dequantize, fake_quant, get_profile, quantize
from nemo_rl_dsv4.numerics.blockwise import reference_dequantize, reference_quantize
from nemo_rl_dsv4.numerics.fake_quant import reference_fake_quant
from nemo_rl_dsv4.numerics.rotary import inverse_rope_backward, inverse_rope_forward
from nemo_rl_dsv4.numerics.swiglu import swiglu_backward, swiglu_forward

HOPPER = get_profile("vllm-hopper")


def spec_of(profile: str, site: str) -> QuantSpec:
    spec = get_profile(profile).site(site)
    assert spec is not None
    return spec


WEIGHT, GROUP, KV = (spec_of("vllm-hopper", site) for site in ("linear.weight", "expert.hidden", "kv.swa"))
STEPS = HOPPER.hidden_bf16_steps
TOKENS, HIDDEN, HEADS, HEAD, ROPE, WIDTH = 16384, 4096, 64, 512, 64, 2048  # V4-Flash


@dataclass
class Case:
    """One kernel at one shape: callables without arguments and the bytes that one pass must move."""

    name: str
    kernel: Callable[[], object]
    reference: Callable[[], object]
    moved: int
    compile: bool = True


def bits(value: object) -> list[Tensor]:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return [t.contiguous().view(torch.uint8) for t in tensors if isinstance(t, Tensor)]


def same(left: object, right: object) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def adversarial(rows: int, columns: int, largest: float, dtype: torch.dtype, device: str) -> Tensor:
    """Random rows of all sizes, zero and tiny ones, and rows whose amax is within 8 ulp of largest * 2^e."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-9, 4, rows)[:, None]
    x[0], x[1] = 0.0, x[1] * 2.0**-110
    edge = torch.tensor([largest * 2.0**e for e in range(-20, 8)]).view(torch.int32)
    for row in range(2, min(rows, 60)):
        x[row] = torch.rand(columns, generator=generator) * 1e-3
        x[row, row % columns] = (edge + (row % 17 - 8)).view(torch.float32)[row % 28].clamp(max=6e4)
    return x.clamp(-6e4, 6e4).to(dtype).to(device)


def check(device: str) -> list[str]:
    """Kernels on ``device`` against the reference on the CPU, for every profile, dtype and kind of input."""
    wrong = []
    specs = sorted({spec for p in PROFILES.values() for s in p.sites if (spec := p.site(s))}, key=repr)
    for spec in [*specs, QuantSpec("e4m3fnuz"), QuantSpec(scale="float32"), QuantSpec(scale_rounding="log2f")]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rows, columns in ((256, 512), (130, 200), (77, 80), (300, 7168)):
                x = adversarial(rows, columns, spec.max_value, dtype, "cpu")
                got, want = fake_quant(x.to(device), spec).cpu(), reference_fake_quant(x, spec)
                label = f"{spec} {dtype} {rows}x{columns}"
                if not same(got, want):
                    wrong.append(f"fake_quant {label}: {int((got != want).sum())} of {want.numel()} values")
                if spec.fmt == "e2m1":
                    continue
                q, ref = quantize(x.to(device), spec), reference_quantize(x, spec)
                if not same((q.data.cpu(), q.scale.cpu()), (ref.data, ref.scale)):
                    wrong.append(f"quantize {label}")
                if not same(dequantize(q, torch.bfloat16).cpu(), reference_dequantize(ref, torch.bfloat16)):
                    wrong.append(f"dequantize {label}")
    wrong += check_fused_sites(device)
    return wrong


def check_fused_sites(device: str) -> list[str]:
    """SwiGLU and inverse RoPE against the reference on the same device (exp and its rounding belong to the device)."""
    from nemo_rl_dsv4.numerics import fused

    wrong = []
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("vllm-hopper", "vllm-blackwell", "vllm-rocm-gfx950"):
            profile = PROFILES[name]
            spec, steps = spec_of(name, "expert.hidden"), profile.hidden_bf16_steps
            for rows, columns in ((513, 2048), (65, 200)):
                gate_up = (torch.randn(rows, 2 * columns, generator=generator) * 6).to(device, dtype)
                gate, up = gate_up.chunk(2, -1)
                got = fused.swiglu_forward(gate, up, spec, 10.0, steps)
                if not same(got, swiglu_forward(gate, up, spec, 10.0, steps)):
                    wrong.append(f"swiglu forward {name} {dtype} {rows}x{columns}")
                grad = torch.randn(rows, columns, generator=generator).to(device, dtype)
                got = fused.swiglu_backward(grad, gate, up, 10.0, steps)
                if not same(got, swiglu_backward(grad, gate, up, 10.0, steps)):
                    wrong.append(f"swiglu backward {name} {dtype} {rows}x{columns}")
        for heads, width, pairs, n_groups in ((64, 512, 32, 8), (4, 80, 8, 2)):
            o = torch.randn(257, heads, width, generator=generator).to(device, dtype)
            angle = (torch.rand(257, pairs, generator=generator) * 6.28).to(device)
            arguments = (o, angle.cos(), angle.sin())
            spec = spec_of("vllm-hopper", "o_proj.input")
            if not same(
                fused.inverse_rope_forward(*arguments, spec, n_groups), inverse_rope_forward(*arguments, spec, n_groups)
            ):
                wrong.append(f"inverse RoPE forward {dtype} {heads}x{width}")
            if not same(fused.inverse_rope_backward(*arguments), inverse_rope_backward(*arguments)):
                wrong.append(f"inverse RoPE backward {dtype} {heads}x{width}")
    return wrong


def cases(device: str) -> list[Callable[[], Case]]:
    """Makers of the cases at V4-Flash shapes; each allocates when called, so that only one is in memory."""
    from nemo_rl_dsv4.numerics import fused

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def fake(name: str, spec: QuantSpec, *shape: int, compiled: bool = True) -> Case:
        x = normal(*shape)
        return Case(name, lambda: fake_quant(x, spec), lambda: reference_fake_quant(x, spec), 2 * nbytes(x), compiled)

    def to_bytes(name: str, *shape: int) -> Case:
        x = normal(*shape)

        def pair(q: Quantized) -> tuple[Tensor, Tensor]:
            return q.data, q.scale

        moved = nbytes(x) * 3 // 2
        return Case(name, lambda: pair(quantize(x, WEIGHT)), lambda: pair(reference_quantize(x, WEIGHT)), moved, False)

    def from_bytes(name: str, *shape: int) -> Case:
        q = quantize(normal(*shape), WEIGHT)
        bf16 = torch.bfloat16
        return Case(name, lambda: dequantize(q, bf16), lambda: reference_dequantize(q, bf16), 3 * nbytes(q.data), False)

    def swiglu(name: str, backward: bool) -> Case:
        gate, up = normal(TOKENS * 6, 2 * WIDTH).chunk(2, -1)
        if not backward:
            arguments = (gate, up, GROUP, 10.0, STEPS)
            return Case(
                name, lambda: fused.swiglu_forward(*arguments), lambda: swiglu_forward(*arguments), 3 * nbytes(gate)
            )
        grad = normal(TOKENS * 6, WIDTH)
        back = (grad, gate, up, 10.0, STEPS)
        return Case(name, lambda: fused.swiglu_backward(*back), lambda: swiglu_backward(*back), 5 * nbytes(grad))

    def rope(name: str, backward: bool) -> Case:
        o = normal(TOKENS, HEADS, HEAD)
        angle = torch.rand(TOKENS, ROPE // 2, device=device) * 6.28
        turn = (o, angle.cos(), angle.sin())
        moved = 2 * nbytes(o, angle)
        if backward:
            return Case(name, lambda: fused.inverse_rope_backward(*turn), lambda: inverse_rope_backward(*turn), moved)
        forward = (*turn, GROUP, 8)
        return Case(name, lambda: fused.inverse_rope_forward(*forward), lambda: inverse_rope_forward(*forward), moved)

    rocm = spec_of("vllm-rocm-gfx950", "linear.input")
    return [
        lambda: fake("activation 1x128 UE8M0, 16384x4096", GROUP, TOKENS, HIDDEN),
        lambda: fake("activation 1x128 float scale, 16384x4096", rocm, TOKENS, HIDDEN),
        lambda: fake("weight 128x128 fake, 4096x4096", WEIGHT, HIDDEN, HIDDEN),
        lambda: fake("weight 128x128 fake, 65536x4096", WEIGHT, 65536, HIDDEN),
        lambda: fake("weight 128x128 fake, 256 experts 2048x4096", WEIGHT, 256, WIDTH, HIDDEN, compiled=False),
        lambda: to_bytes("weight quantize, 256 experts 2048x4096", 256, WIDTH, HIDDEN),
        lambda: from_bytes("weight dequantize, 256 experts 2048x4096", 256, WIDTH, HIDDEN),
        lambda: fake("KV 1x64 keep 64, 16384x512", KV, TOKENS, HEAD),
        lambda: fake("KV 1x64 keep 64, 262144x512", KV, TOKENS * 16, HEAD),
        lambda: swiglu("SwiGLU + quantize, 98304x2048", backward=False),
        lambda: swiglu("SwiGLU backward, 98304x2048", backward=True),
        lambda: rope("inverse RoPE + quantize, 16384x64x512", backward=False),
        lambda: rope("RoPE backward, 16384x64x512", backward=True),
    ]


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of ``call`` on the GPU with a cold L2."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))  # pyright: ignore[reportArgumentType]


def copy_rate() -> float:
    """Bytes per second of torch's device copy, 1 GiB read and written."""
    source = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16).normal_()
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


def measure_gpu(with_compile: bool) -> list[dict]:
    """One row a case; everything but the shape is measured here."""
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {rate / 1e9:.0f} GB/s")
    print(f"{'kernel':46s} {'ms':>8s} {'of copy':>8s} {'x eager':>8s} {'x compile':>9s}  bits = eager, compile")
    table = []
    for make in cases("cuda"):
        case = make()
        equal = same(case.kernel(), case.reference())
        fused, eager = milliseconds(case.kernel), milliseconds(case.reference)
        compiled, compiled_equal = compiled_time(case) if with_compile else (None, None)
        row = {
            "kernel": case.name,
            "ms": fused,
            "of_copy": case.moved / fused * 1e3 / rate,
            "speedup_eager": eager / fused,
            "speedup_compile": compiled / fused if compiled else None,
            "same_bits": equal,
            "compile_same_bits": compiled_equal,
        }
        table.append(row)
        ratio = f"{row['speedup_compile']:9.1f}" if compiled else " " * 9
        print(
            f"{case.name:46s} {fused:8.3f} {row['of_copy']:8.2f} {eager / fused:8.1f} {ratio}  "
            f"{equal}, {compiled_equal}"
        )
        del case
        torch.cuda.empty_cache()
    return table


def sweep() -> list[dict]:
    """Every kernel's tile size and warp count, as a share of the copy rate."""
    from nemo_rl_dsv4.numerics.fused import groups, kv, rotary, swiglu, weights

    rate = copy_rate()
    table = []
    modules = {"activation": groups, "KV": kv, "SwiGLU": swiglu, "inverse": rotary, "RoPE": rotary, "weight": weights}
    for make in cases("cuda"):
        case = make()
        module: Any = modules[case.name.split()[0]]
        defaults = (getattr(module, "TILE_ELEMENTS", None), module.NUM_WARPS)
        for tile in (1024, 2048, 4096, 8192, 16384) if defaults[0] else (None,):
            for warps in (2, 4, 8, 16):
                if tile:
                    module.TILE_ELEMENTS = tile
                module.NUM_WARPS = warps
                share = case.moved / milliseconds(case.kernel) * 1e3 / rate
                table.append({"kernel": case.name, "tile": tile, "warps": warps, "of_copy": share})
        if defaults[0]:
            module.TILE_ELEMENTS = defaults[0]
        module.NUM_WARPS = defaults[1]
        best = sorted((r for r in table if r["kernel"] == case.name), key=lambda r: -r["of_copy"])[:4]
        print(f"{case.name:46s}", "  ".join(f"tile {r['tile']} warps {r['warps']}: {r['of_copy']:.3f}" for r in best))
        del case
        torch.cuda.empty_cache()
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
    parser.add_argument("--sweep", action="store_true", help="try tile sizes and warp counts")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the tensor of the CPU memory measurement")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    if options.device == "cpu":
        table = measure_cpu(options.gigabytes)
        failed = []
    else:
        failed = check("cuda")
        print("bits: " + ("all equal" if not failed else "\n  ".join([f"{len(failed)} differences", *failed[:20]])))
        if options.check:
            return 1 if failed else 0
        table = sweep() if options.sweep else measure_gpu(not options.no_compile)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
