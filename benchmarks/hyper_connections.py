"""Hyper-connections on a GPU: the fused mixing against AutoModel's expression, and both against vLLM's kernels.

    python benchmarks/hyper_connections.py                  speed and bits of the mixing
    python benchmarks/hyper_connections.py --vllm           in vLLM's environment: what its kernels compute

Prints shares of BF16 values that differ and relative errors; the last column of the speed table is the time over that
of a copy of the same bytes (streams read and written, the layer's output read).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.generation.vllm_settings import check_hidden_size
from nemo_rl_dsv4.numerics.hyper_connections import (
    mix_streams,
    mix_streams_forward,
    norm_from_squares,
    tf32_values,
)
from nemo_rl_dsv4.numerics.products import tf32_linear

Project = Callable[[Tensor], Tensor]
"""Flat streams [T, N * D] to their projection [T, (2 + N) N], before the scaling by their root mean square."""

STREAMS, EPS, SINKHORN = 4, 1e-6, 20


def inputs(tokens: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """post, comb, out, streams."""
    g = torch.Generator(device).manual_seed(0)
    post = torch.rand(tokens, STREAMS, generator=g, device=device) * 2
    comb = torch.softmax(torch.randn(tokens, STREAMS, STREAMS, generator=g, device=device), -1)
    out = torch.randn(tokens, width, generator=g, device=device).bfloat16()
    return post, comb, out, (torch.randn(tokens, STREAMS, width, generator=g, device=device) * 2).bfloat16()


def inline(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """What AutoModel's and transformers' blocks compute: coefficients and products in BF16."""
    narrow = streams.dtype
    return post.to(narrow).unsqueeze(-1) * out.unsqueeze(-2) + comb.transpose(-1, -2).to(narrow) @ streams


def differing(a: Tensor, b: Tensor) -> float:
    return float((a != b).double().mean())


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def speed(tokens: int, width: int) -> None:
    """Forward, and forward with backward, of the fused kernels and of AutoModel's expression."""
    given = inputs(tokens, width, "cuda")
    fused, reference = mix_streams(*given), mix_streams_forward(*given)
    print(f"fused against the reference: {differing(fused, reference):.2e} of the values differ")
    print(f"AutoModel's expression against the reference: {differing(inline(*given), reference):.2e}")
    source = torch.empty(2 * STREAMS + 1, tokens, width, dtype=torch.bfloat16, device="cuda")
    copy = milliseconds(lambda: source[: STREAMS + 1].clone()) * (2 * STREAMS + 1) / (2 * STREAMS + 2)
    leaves = [t.clone().requires_grad_() for t in given]
    grad = torch.randn_like(fused)
    print("| mixing | forward, ms | forward and backward, ms | forward over a copy |\n|---|---|---|---|")
    for name, mix in (("fused, float32", mix_streams), ("AutoModel's expression, BF16", inline)):

        def both(mix: Callable[..., Tensor] = mix) -> None:
            torch.autograd.grad(mix(*leaves), leaves, grad)

        forward = milliseconds(lambda mix=mix: mix(*given))
        print(f"| {name} | {forward:.3f} | {milliseconds(both):.3f} | {forward / copy:.2f} |")


def coefficients(streams: Tensor, project: Project, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb of streams [T, N, D] in float64 from their projection."""
    n = STREAMS
    flat = streams.flatten(1)
    mixes = project(flat).double() * torch.rsqrt(flat.double().square().mean(-1, keepdim=True) + EPS)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + EPS
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(SINKHORN - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return pre, post, comb


def exactly(weight: Tensor) -> Project:
    """Products and sums in float64."""
    return lambda flat: flat.double() @ weight.double().t()


def on_tensor_cores(weight: Tensor) -> Project:
    """As the trainer's GPU takes them, in parts of `products.SPLIT` columns."""
    return lambda flat: tf32_linear(flat[:, : weight.shape[1]].float(), tf32_values(weight))


def against_vllm(tokens: int, width: int) -> None:
    """Which arithmetic vLLM's hyper-connection kernels follow."""
    from vllm.model_executor.kernels.mhc.tilelang import (  # pyright: ignore[reportMissingImports]
        mhc_fused_post_pre_tilelang,
        mhc_post_tilelang,
        mhc_pre_broadcast_tilelang,
        mhc_pre_tilelang,
    )

    post, comb, out, streams = inputs(tokens, width, "cuda")
    g = torch.Generator("cuda").manual_seed(1)
    rows = (2 + STREAMS) * STREAMS
    fn = torch.randn(rows, STREAMS * width, generator=g, device="cuda") * 0.02
    scale, base = torch.ones(3, device="cuda"), torch.zeros(rows, device="cuda")
    weight = (torch.rand(width, generator=g, device="cuda") + 0.5).bfloat16()
    settings = (scale, base, EPS, EPS, EPS, 2.0, SINKHORN)

    mixed = mhc_post_tilelang(out, streams, post.unsqueeze(-1), comb)
    print(
        f"mixing, {tokens} tokens: float32 {differing(mix_streams(post, comb, out, streams), mixed):.2e} of the values"
    )
    print(f"  differ from vLLM's, AutoModel's expression {differing(inline(post, comb, out, streams), mixed):.2e}")
    truncated = (fn.view(torch.int32) & ~0x1FFF).view(torch.float32)
    readings = {
        "float32 weights": exactly(fn),
        "TF32, truncated": exactly(truncated),
        "TF32, to nearest": exactly(tf32_values(fn)),
        "on tensor cores": on_tensor_cores(fn),
    }

    def compare(name: str, given: Tensor, found: tuple[Tensor, Tensor, Tensor], projects: dict[str, Project]) -> None:
        print(f"{name}, {len(given)} tokens: relative error of post / comb, share of normed inputs that differ")
        for reading, project in projects.items():
            pre, post, comb = coefficients(given, project, scale, base)
            collapsed = (pre.unsqueeze(-1) * given.double()).sum(1)
            narrow = collapsed.bfloat16()
            before = norm_from_squares(narrow, collapsed.square().mean(-1, keepdim=True).float(), weight, EPS)
            after = norm_from_squares(narrow, narrow.float().square().mean(-1, keepdim=True), weight, EPS)
            print(
                f"  {reading:18} {error(found[0].squeeze(-1), post):.1e} / {error(found[1], comb):.1e}   "
                f"mean square before the cast {differing(before, found[2]):.2e}, after {differing(after, found[2]):.2e}"
            )

    for count in (tokens, 64, 8):
        part = tuple(t[:count].contiguous() for t in (out, streams, post.unsqueeze(-1), comb))
        new, *found = mhc_fused_post_pre_tilelang(*part, fn, *settings, norm_weight=weight, norm_eps=EPS)
        compare("post and pre", new, tuple(found), readings)  # pyright: ignore[reportArgumentType]
    alone = mhc_pre_tilelang(streams, fn, *settings, norm_weight=weight, norm_eps=EPS)
    compare("pre", streams, alone, readings)
    total = fn.view(rows, STREAMS, width).sum(1)
    copies, *found = mhc_pre_broadcast_tilelang(
        out, fn, *settings, norm_weight=weight, norm_eps=EPS, fn_broadcast=total.contiguous()
    )
    zeros = torch.zeros(rows, (STREAMS - 1) * width, device="cuda")
    sums = {
        "float32 weights": exactly(fn),
        "TF32, to nearest": exactly(tf32_values(fn)),
        "TF32 of the sum": exactly(torch.cat([tf32_values(total), zeros], 1)),
        "on tensor cores": on_tensor_cores(total),
    }
    compare("first layer", copies, tuple(found), sums)  # pyright: ignore[reportArgumentType]


def main() -> int:
    """Measure, or compare with vLLM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(1), default=8192)
    parser.add_argument("--width", type=at_least(1), default=4096)
    parser.add_argument("--vllm", action="store_true", help="compare with the kernels of the installed vLLM")
    args = parser.parse_args()
    if args.vllm and importlib.util.find_spec("vllm") is None:
        parser.error("--vllm: no vllm in this environment; wanted vLLM 0.26.0, start it with that one's interpreter")
    if args.vllm:
        check_hidden_size(args.width, "--width")
    if not torch.cuda.is_available():
        parser.error("torch sees 0 GPUs here; wanted one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.tokens} tokens, width {args.width}")
    if args.vllm:
        against_vllm(min(args.tokens, 2048), args.width)
    else:
        speed(args.tokens, args.width)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --tokens or --width"))
