"""Forward and backward of a few DeepSeek-V4-Flash layers in BF16, QAT and FP8, in one run. One table.

python benchmarks/policy.py                        on a GPU: 3 layers (ratios 0, 4, 128), 32 experts, 8,192 tokens
python benchmarks/policy.py --attn sdpa --sequence 1024     without TileLang: dense attention, 8 x 1,024 tokens
python benchmarks/policy.py --attn skip            leaves the attention product out: what is left bounds the overhead
python benchmarks/policy.py --sites --gemms --profile       cost of each rounding site, of each product, of each kernel
python benchmarks/policy.py --device cpu           a small model, for the code path only

Times are medians of interleaved passes (CUDA events, after warm-up). A pass is one micro-batch: weights are quantized
once an update, and what that costs is a column of its own. Peak memory is what a pass adds to the memory before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.fp8 import install_fp8
from nemo_rl_dsv4.model.fp8_gemm import scaled_grouped_mm, scaled_linear, weight_handle
from nemo_rl_dsv4.model.known_models import FLASH
from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant, invalidate_rounded_weights
from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, weight_roundings
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import dequantize, get_profile, quantize

MODES = ("bf16", "qat", "fp8")
SMALL = {
    "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "head_dim": 80, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 64,
    "sliding_window": 32, "num_experts_per_tok": 2,
}  # fmt: skip


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """Official-style config.json of the benchmark's model."""
    layers = options.layers
    config = {**FLASH, **(SMALL if options.device == "cpu" else {})}
    return {
        **config,
        "num_hidden_layers": layers,
        "compress_ratios": [(0, 4, 128)[i % 3] for i in range(layers)],
        "n_routed_experts": options.experts,
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
    }


def make_model(options: argparse.Namespace, mode: str, switches: dict[str, bool] | None = None) -> torch.nn.Module:
    """A model of `mode` with the same random weights every time; prints where FP8 products run."""
    attention = "sdpa" if options.attn == "skip" else options.attn
    device = torch.device(options.device)
    model = build_model(
        automodel_config(config_of(options)),
        backend={**CPU_BACKEND, "attn": attention, "experts": "torch_mm"},
        dtype=torch.bfloat16,
        routing_weight_after_down=True,
        seed=0,
        device=device,
    )
    if mode != "bf16":
        report = install_fake_quant(model, get_profile(options.profile_name), switches or dict.fromkeys(SWITCHES, True))
        for _, _, _, rounding in weight_roundings(model):
            rounding.keep_values = not options.dequantize_each_pass
        if mode == "fp8":
            install_fp8(model, report)
            print(report.summary(), file=sys.stderr)
    return model.train()


def skip_attention_product() -> None:
    """Replace AutoModel's dense attention by its values: no scores, no softmax."""
    from nemo_automodel.components.models.deepseek_v4 import layers

    def values_only(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any):
        return (query + value[:, :, : query.shape[2]]).transpose(1, 2).contiguous(), None

    layers.eager_attention_with_sink = values_only


def one_pass(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Forward and backward of one micro-batch."""
    model(ids).logits.float().mean().backward()


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def median_of(run: Callable[[], object], device: str, repeats: int = 10, warm: int = 3) -> float:
    """Median milliseconds of `repeats` calls after `warm`."""
    for _ in range(warm):
        run()
    return statistics.median(timed(run, device) for _ in range(repeats))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The table of modes: interleaved medians, ratios to BF16, memory."""
    device = options.device
    ids = torch.randint(3, 1024, (options.tokens // options.sequence, options.sequence), device=device)
    models = {mode: make_model(options, mode) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    rows: dict[str, Any] = {mode: {} for mode in MODES}
    for repeat in range(-options.warm, options.repeats):
        for mode, model in models.items():
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            elapsed = timed(lambda model=model: one_pass(model, ids), device)
            if device != "cpu":
                rows[mode]["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            model.zero_grad(set_to_none=True)
            if repeat >= 0:
                times[mode].append(elapsed)
    for mode, model in models.items():
        rows[mode]["ms"] = statistics.median(times[mode])
        rows[mode]["spread_ms"] = max(times[mode]) - min(times[mode])
        with torch.no_grad():
            rows[mode]["forward_ms"] = median_of(lambda model=model: model(ids), device, options.repeats, 1)
        roundings = [rounding for *_, rounding in weight_roundings(model)]
        codes = [r.stored.data.numel() for r in roundings if r.stored is not None]
        rows[mode]["codes_gb"] = sum(codes) / 1e9
        rows[mode]["values_gb"] = sum(r._values.nbytes for r in roundings if r._values is not None) / 1e9

        def update(model: torch.nn.Module = model) -> None:
            invalidate_rounded_weights(model)
            refresh_quantized(model)

        rows[mode]["quantize_ms"] = median_of(update, device, 3, 1) if roundings else 0.0
    for mode in MODES:
        rows[mode]["over_bf16"] = rows[mode]["ms"] / rows["bf16"]["ms"]
    if options.profile and device != "cpu":
        for mode, model in models.items():
            rows[mode]["kernels"] = top_kernels(lambda model=model: one_pass(model, ids))
            model.zero_grad(set_to_none=True)
    return rows


def top_kernels(run: Callable[[], object], count: int = 22) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of the kernels that take longest in one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    found = [(e.key[:110], e.self_device_time_total / 1e3, e.count) for e in traced.key_averages()]
    return sorted(found, key=lambda row: -row[1])[:count]


def site_costs(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds that each switch adds to a BF16 pass when it alone is on."""
    device = options.device
    ids = torch.randint(3, 1024, (options.tokens // options.sequence, options.sequence), device=device)
    plain = make_model(options, "bf16")
    costs = {}
    for switch in SWITCHES:
        model = make_model(options, "qat", {**dict.fromkeys(SWITCHES, False), switch: True})
        pairs = []
        for repeat in range(-2, options.repeats):
            pair = [timed(lambda m=m: one_pass(m, ids), device) for m in (plain, model)]
            for m in (plain, model):
                m.zero_grad(set_to_none=True)
            if repeat >= 0:
                pairs.append(pair[1] - pair[0])
        costs[switch] = statistics.median(pairs)
        del model
        gc.collect()
    return costs


def gemm_costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each product of a layer apart: BF16, FP8 (quantization included), its parts, and the backward pass."""
    device, tokens = options.device, options.tokens
    config = config_of(options)
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], options.experts
    profile = get_profile(options.profile_name)
    spec, weight_spec = profile.site("linear.input"), profile.site("linear.weight")
    assert spec is not None and weight_spec is not None
    rows = []
    head = config["num_attention_heads"] * config["head_dim"]
    shapes = {
        "wq_a": (hidden, config["q_lora_rank"], 1),
        "wq_b": (config["q_lora_rank"], head, 1),
        "wo_a": (head // config["o_groups"], config["o_groups"] * config["o_lora_rank"], config["o_groups"]),
        "wo_b": (config["o_groups"] * config["o_lora_rank"], hidden, 1),
        "shared w1": (hidden, width, 1),
    }
    for name, (k, n, groups) in shapes.items():
        lead = (tokens, groups) if groups > 1 else (tokens,)
        x = torch.randn(*lead, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        stored = WeightRounding(weight_spec, keep_values=False).quantized(weight)

        def plain(x: torch.Tensor = x, weight: torch.Tensor = weight, groups: int = groups) -> torch.Tensor:
            if groups == 1:
                return x @ weight.t()
            return torch.bmm(x.transpose(0, 1), weight.view(groups, -1, x.shape[-1]).transpose(1, 2)).transpose(0, 1)

        def fp8(x=x, weight=weight, stored=stored, groups=groups) -> torch.Tensor:
            return scaled_linear(x, weight, stored, spec, groups=groups)

        rows.append(product_row(name, x, plain, fp8, device))
    counts = torch.full((experts,), tokens * config["num_experts_per_tok"] // experts, dtype=torch.int32)
    ends = counts.cumsum(0).to(torch.int32).to(device)
    for name, (k, n, halves) in {"experts w1 w3": (hidden, 2 * width, 2), "experts w2": (width, hidden, 1)}.items():
        x = torch.randn(int(ends[-1]), k, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(experts, k, n, device=device, dtype=torch.bfloat16, requires_grad=True)
        stored = WeightRounding(weight_spec, halves, keep_values=False, transposed=True).quantized(weight)

        def grouped(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return torch._grouped_mm(x, weight, offs=ends)

        def fp8_grouped(x=x, weight=weight, stored=stored) -> torch.Tensor:
            return scaled_grouped_mm(x, weight_handle(weight, x.dtype), ends, stored, spec)

        rows.append(product_row(name, x, grouped, fp8_grouped, device))
        q = quantize(x.detach(), spec)
        rows[-1]["quantize_ms"] = median_of(lambda x=x: quantize(x.detach(), spec), device)
        rows[-1]["dequantize_ms"] = median_of(lambda q=q: dequantize(q, torch.bfloat16), device)
        rows[-1]["weights_dequantize_ms"] = median_of(lambda s=stored: s.values(torch.bfloat16), device)
    return rows


def product_row(
    name: str, x: torch.Tensor, plain: Callable[[], torch.Tensor], fp8: Callable[[], torch.Tensor], device: str
) -> dict[str, Any]:
    """Forward, and forward with backward, of one product in BF16 and FP8."""
    row: dict[str, Any] = {"product": name, "rows": x.shape[0]}
    for mode, run in (("bf16", plain), ("fp8", fp8)):
        with torch.no_grad():
            row[f"{mode}_forward_ms"] = median_of(run, device)
        upstream = torch.ones_like(run())
        row[f"{mode}_both_ms"] = median_of(lambda run=run, upstream=upstream: run().backward(upstream), device)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=at_least(1), default=3)
    parser.add_argument("--tokens", type=at_least(1), help="of a pass, all sequences together (8192; 256 on a CPU)")
    parser.add_argument("--sequence", type=at_least(1), help="tokens of a sequence; default: one sequence")
    parser.add_argument("--experts", type=at_least(1), help="routed experts of a layer (32; 8 on a CPU)")
    parser.add_argument("--attn", choices=("tilelang", "sdpa", "skip"), help="default: tilelang, sdpa on a CPU")
    parser.add_argument("--profile-name", default="vllm-hopper", help="rollout profile to imitate")
    parser.add_argument("--repeats", type=at_least(1), default=10)
    parser.add_argument("--warm", type=at_least(0), default=3, help="passes before timing")
    parser.add_argument("--dequantize-each-pass", action="store_true", help="QAT keeps codes only, no rounded copy")
    parser.add_argument("--sites", action="store_true", help="also the cost of each rounding switch alone")
    parser.add_argument("--gemms", action="store_true", help="also each product apart")
    parser.add_argument("--profile", action="store_true", help="also the kernels that take longest, by mode")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu")
    get_profile(options.profile_name)  # refuses a name that is none
    cpu = options.device == "cpu"
    options.tokens = options.tokens or (256 if cpu else 8192)
    options.sequence = options.sequence or options.tokens
    options.experts = options.experts or (8 if cpu else 32)
    options.attn = options.attn or ("sdpa" if cpu else "tilelang")
    if options.tokens % options.sequence:
        parser.error(f"--tokens {options.tokens} is no multiple of --sequence {options.sequence}")
    if options.attn == "tilelang":
        from nemo_automodel.components.models.deepseek_v4.kernels._tilelang import HAS_TILELANG

        if not HAS_TILELANG:
            parser.error("--attn tilelang needs the tilelang package; take --attn sdpa or skip")
    if options.attn == "skip":
        skip_attention_product()
    found: dict[str, Any] = {
        "device": "cpu" if cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(options).items() if k not in ("json", "device")},
    }
    parts = {"modes": measure}
    if options.sites:
        parts["sites_ms"] = site_costs
    if options.gemms:
        parts = {"gemms": gemm_costs, **parts}
    for name, run in parts.items():
        found[name] = run(options)
        gc.collect()
        if not options.json:
            print(f"\n{name}", *table(found[name]), sep="\n", flush=True)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n" + json.dumps({k: found[k] for k in ("device", "torch", "settings")}))
    return 0


def table(rows: Any) -> list[str]:
    """Printable lines of one part."""
    if isinstance(rows, list):
        return [
            "  " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in r.items()) for r in rows
        ]
    lines = []
    for name, row in rows.items():
        if not isinstance(row, dict):
            lines.append(f"  {name:14} {row:+.3f}")
            continue
        lines.append(f"  {name:5} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)))
        lines += [f"        {ms:9.3f} ms x{calls:<5} {kernel}" for kernel, ms, calls in row.get("kernels", [])]
    return lines


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --layers, --tokens or --experts"))
