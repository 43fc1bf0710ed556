"""Bits of the fused kernels against the reference, for ``benchmarks/numerics.py``."""

import functools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl_dsv4.numerics import PROFILES, QuantSpec, dequantize, fake_quant, get_profile, quantize
from nemo_rl_dsv4.numerics.blockwise import reference_dequantize, reference_quantize
from nemo_rl_dsv4.numerics.fake_quant import reference_fake_quant
from nemo_rl_dsv4.numerics.rotary import inverse_rope_backward, inverse_rope_forward
from nemo_rl_dsv4.numerics.swiglu import swiglu_backward, swiglu_forward

HOPPER = get_profile("vllm-hopper")


def spec_of(profile: str, site: str) -> QuantSpec:
    """The spec of a site that the profile quantizes."""
    spec = get_profile(profile).site(site)
    assert spec is not None
    return spec


WEIGHT, GROUP, KV = (spec_of("vllm-hopper", site) for site in ("linear.weight", "expert.hidden", "kv.swa"))
STEPS = HOPPER.hidden_bf16_steps


def bits(value: object) -> list[Tensor]:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return [t.contiguous().view(torch.uint8) for t in tensors if isinstance(t, Tensor)]


def same(left: object, right: object) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))


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


def checked_specs() -> list[QuantSpec]:
    specs = sorted({spec for p in PROFILES.values() for s in p.sites if (spec := p.site(s))}, key=repr)
    return [*specs, QuantSpec("e4m3fnuz"), QuantSpec(scale="float32"), QuantSpec(scale_rounding="log2f")]


def check(device: str, workers: int) -> list[str]:
    """Kernels on ``device`` against the reference on the CPU, for every profile, dtype and kind of input."""
    jobs: list[tuple[QuantSpec, torch.dtype] | Callable[[str], list[str]]] = [check_fused_sites, check_compiled]
    jobs += [(spec, dtype) for spec in checked_specs() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    return [line for lines in in_processes(functools.partial(check_job, device), jobs, workers) for line in lines]


def check_job(device: str, job: tuple[QuantSpec, torch.dtype] | Callable[[str], list[str]]) -> list[str]:
    """One spec and dtype, or a check of its own."""
    torch.set_num_threads(1)
    if callable(job):
        try:
            return job(device)
        except Exception as error:  # an error of a compiler cannot be pickled; any is a finding here
            return [f"{job.__name__}: {type(error).__name__}: {error}"]
    spec, dtype = job
    wrong = []
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
    for bad in (float("nan"), float("inf")):
        x = torch.ones(4, 512, dtype=dtype).index_fill_(1, torch.tensor(3), bad)
        if not torch.equal(fake_quant(x.to(device), spec).cpu().isnan(), reference_fake_quant(x, spec).isnan()):
            wrong.append(f"fake_quant of {bad} {spec} {dtype}")
    return wrong


def in_processes(work: Callable[[Any], Any], jobs: list, workers: int) -> list:
    """Results of ``work`` on each job; most of the time goes into compiling, which one process does on one core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        return list(pool.map(work, jobs))


def check_fused_sites(device: str) -> list[str]:
    """SwiGLU and inverse RoPE against the reference on the same device (exp and its rounding belong to the device)."""
    from nemo_rl_dsv4.numerics import fused

    wrong = []
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        for name, profile in PROFILES.items():
            spec, steps = profile.site("expert.hidden"), profile.hidden_bf16_steps
            if spec is None:
                continue
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
        check_extreme_gates(device, dtype, wrong)
        for heads, width, pairs, n_groups in ((64, 512, 32, 8), (4, 80, 8, 2), (4, 192, 24, 1)):
            o = torch.randn(257, heads, width, generator=generator).to(device, dtype)
            angle = (torch.rand(257, pairs, generator=generator) * 6.28).to(device)
            arguments = (o, angle.cos(), angle.sin())
            for spec in sorted({s for p in PROFILES.values() if (s := p.site("o_proj.input"))}, key=repr):
                turned = fused.inverse_rope_forward(*arguments, spec, n_groups)
                if not same(turned, inverse_rope_forward(*arguments, spec, n_groups)):
                    wrong.append(f"inverse RoPE forward {dtype} {heads}x{width} {spec}")
            if not same(fused.inverse_rope_backward(*arguments), inverse_rope_backward(*arguments)):
                wrong.append(f"inverse RoPE backward {dtype} {heads}x{width}")
    return wrong


def check_compiled(device: str) -> list[str]:
    """Rounding inside a function under torch.compile or checkpointing, and its gradient."""
    from torch.utils.checkpoint import checkpoint

    wrong = []
    for spec in (WEIGHT, GROUP, KV, QuantSpec(block=(256, 128)), QuantSpec(block=(128, 256))):

        def layer(x: Tensor, spec: QuantSpec = spec) -> Tensor:
            return fake_quant(x * 2, spec) * 3

        def recomputed(x: Tensor, layer: Callable[[Tensor], Tensor] = layer) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

        x = adversarial(256, 512, 448.0, torch.bfloat16, device)
        want = (reference_fake_quant((x * 2).cpu(), spec) * 3).to(device)
        for how, call in (("torch.compile", torch.compile(layer, dynamic=False)), ("checkpoint", recomputed)):
            leaf = x.clone().requires_grad_()
            got = call(leaf)
            got.sum().backward()
            if not same(got.detach(), want) or leaf.grad is None or not bool((leaf.grad == 6).all()):
                wrong.append(f"{how} of {spec}")
    return wrong


def check_extreme_gates(device: str, dtype: torch.dtype, wrong: list[str]) -> None:
    """SwiGLU at every gate around where 1 / (1 + exp(-gate)) leaves the normal range, and at signed zeros."""
    from nemo_rl_dsv4.numerics import fused

    bits_type = torch.int16 if dtype == torch.bfloat16 else torch.int32
    edges = torch.tensor([-89.5, -86.5], device=device, dtype=dtype).view(bits_type).tolist()
    gate = torch.arange(edges[1], edges[0] + 1, device=device, dtype=torch.int32).to(bits_type).view(dtype)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-38, -1e-44, 3.0, -200.0, 15.0], device=device, dtype=dtype)
    gate = torch.cat([gate, special.repeat(16)])
    gate = gate[: gate.numel() // 128 * 128].reshape(-1, 128)
    up = torch.randn(gate.shape, generator=torch.Generator(device).manual_seed(9), device=device).to(dtype)
    grad = up.flip(0) * 1e4
    spec = QuantSpec(block=(1, 128))
    for limit in (10.0, float("inf")):
        for steps in ((), STEPS):
            got = fused.swiglu_forward(gate, up, spec, limit, steps)
            if not same(got, swiglu_forward(gate, up, spec, limit, steps)):
                wrong.append(f"swiglu forward, extreme gates, {dtype} limit {limit} {steps}")
            got = fused.swiglu_backward(grad, gate, up, limit, steps)
            if not same(got, swiglu_backward(grad, gate, up, limit, steps)):
                wrong.append(f"swiglu backward, extreme gates, {dtype} limit {limit} {steps}")
