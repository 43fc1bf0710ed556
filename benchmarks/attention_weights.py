"""Attention weights in BF16 (`attention_probs_bf16`): what they cost, and their bits against FlashMLA's kernels.

    python benchmarks/attention_weights.py [--device cpu]   share of outputs that change; milliseconds with and without
    python benchmarks/attention_weights.py --vllm           in vLLM's environment, on a Hopper GPU: shares of BF16
                                                            values that differ from its prefill and decode kernels

The kernels get random queries and KV entries that FP8 holds exactly, so that only the attention itself can differ. Rows
are queries with up to 64 keys, where prefill and decoding round alike, and with more, where they do not; decoding in a
batch of 8 splits a query's blocks between multiprocessors, in a batch of 64 it does not.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.numerics import fake_quant, get_profile
from nemo_rl_dsv4.numerics.attention import attend_with_rounded_weights
from nemo_rl_dsv4.numerics.products import bf16_scores

HEADS, WIDTH, WINDOW, PAGE = 64, 512, 128, 64
SCALING = WIDTH**-0.5
TOKEN_BYTES, SCALE_BYTES = 448 + 2 * 64, 8


def inputs(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [tokens, H, D] and KV entries [tokens, D], BF16, the latter as the cache holds them; sinks [H]."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, HEADS, WIDTH, generator=generator).bfloat16().to(device)
    entries = torch.randn(tokens, WIDTH, generator=generator).bfloat16().to(device)
    spec = get_profile("vllm-hopper").site("kv.swa")
    assert spec is not None
    return query, fake_quant(entries, spec), torch.randn(HEADS, generator=generator).to(device)


def causal(tokens: int, device: str) -> Tensor:
    """bool [1, 1, T, T]: the window of each query."""
    at = torch.arange(tokens, device=device)
    return ((at[:, None] >= at) & (at[:, None] - at < WINDOW))[None, None]


def scores_of(query: Tensor, keys: Tensor) -> Tensor:
    """float32 [1, H, T, K] of queries [T, H, D] and keys [K, D], as the trainer takes them."""
    return bf16_scores(query.transpose(0, 1)[None], keys[None, None])


def rounded(scores: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor) -> Tensor:
    """This package's attention, [1, H, T, D] float32."""
    window = keys.shape[0]
    return attend_with_rounded_weights(
        scores, keys[None, None], visible, sinks, scaling=SCALING, window=window, largest_window=WINDOW
    )


def unrounded(scores: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor) -> Tensor:
    """The same in float32."""
    logits = (scores * SCALING).masked_fill(~visible, -torch.inf)
    combined = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    return combined.softmax(-1)[..., :-1] @ keys.float()


def prefill(query: Tensor, keys: Tensor, sinks: Tensor) -> Tensor:
    """FlashMLA's sparse prefill of one sequence, [T, H, D] BF16."""
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    tokens = len(query)
    at = torch.arange(tokens, device=query.device)
    first = (at - WINDOW + 1).clamp(min=0)
    slots = first[:, None] + torch.arange(WINDOW, device=query.device)
    indices = slots.masked_fill(slots > at[:, None], -1).int()
    lengths = (at - first + 1).int()
    out, *_ = flash_mla_sparse_fwd(
        query, keys[:, None], indices[:, None], SCALING, attn_sink=sinks, topk_length=lengths
    )
    return out


def decode(query: Tensor, keys: Tensor, sinks: Tensor, at: Tensor) -> Tensor:
    """FlashMLA's sparse decoding of the queries at some positions, a request each, [N, H, D] BF16."""
    from vllm.models.deepseek_v4.common.ops.cache_utils import quantize_and_insert_k_cache
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    pages = -(-len(keys) // PAGE)
    stride = -(-PAGE * (TOKEN_BYTES + SCALE_BYTES) // TOKEN_BYTES) * TOKEN_BYTES
    raw = torch.zeros(pages, stride, dtype=torch.uint8, device=keys.device)
    quantize_and_insert_k_cache(keys, raw, torch.arange(len(keys), device=keys.device), block_size=PAGE)
    width = TOKEN_BYTES + SCALE_BYTES
    cache = raw.as_strided((pages, PAGE, 1, width), (stride, width, width, 1))
    first = (at - WINDOW + 1).clamp(min=0)
    slots = first[:, None] + torch.arange(WINDOW, device=keys.device)
    indices = slots.masked_fill(slots > at[:, None], -1).int()[:, None]
    out, _ = flash_mla_with_kvcache(
        q=query[at][:, None],
        k_cache=cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=WIDTH,
        tile_scheduler_metadata=get_mla_metadata()[0],
        softmax_scale=SCALING,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sinks,
        topk_length=(at - first + 1).int(),
    )
    return out[:, 0]


def compare_with_vllm() -> None:
    """Print shares of BF16 values that differ from the kernels'."""
    tokens, device = 512, "cuda"
    query, keys, sinks = inputs(tokens, device)
    scores, visible = scores_of(query, keys), causal(tokens, device)
    ours = {
        "BF16 weights": rounded(scores, keys, visible, sinks)[0].transpose(0, 1).bfloat16(),
        "float32 weights": unrounded(scores, keys, visible, sinks)[0].transpose(0, 1).bfloat16(),
    }
    whole = prefill(query, keys, sinks)
    short, long = torch.arange(64, device=device), torch.arange(tokens - 64, tokens, device=device)
    rows = [("prefill, up to 64 keys", short, whole[short]), ("prefill, 128 keys", long, whole[long])]
    for batch in (64, 8):
        for name, at in ((f"decode, batch {batch}, up to 64 keys", short), (f"decode, batch {batch}, 128 keys", long)):
            rows.append((name, at[-batch:], decode(query, keys, sinks, at[-batch:])))
    print("share of BF16 values that differ, or relative error (all values)")
    for name, at, kernel in rows:
        for label, found in ours.items():
            differing = float((found[at] != kernel).double().mean())
            error = float((found[at].double() - kernel.double()).norm() / kernel.double().norm())
            print(f"{name:36} {label:16} {differing:.2e}  {error:.2e}")
    differing = float((decode(query, keys, sinks, long) != whole[long]).double().mean())
    print(f"{'the engine: decode against prefill, 128 keys':53} {differing:.2e}")


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median of some runs after two."""
    times = []
    for number in range(2 + repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number > 1:
            times.append(1e3 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


def compare_times(device: str, tokens: int, repeats: int) -> None:
    """Print milliseconds forward and with the backward, of one sequence."""
    query, keys, sinks = inputs(tokens, device)
    visible = causal(tokens, device)

    both = [attend(scores_of(query, keys), keys, visible, sinks).bfloat16() for attend in (rounded, unrounded)]
    print(f"BF16 outputs that rounding the weights changes: {float((both[0] != both[1]).double().mean()):.2f}")

    def step(attend: Callable[..., Tensor], backward: bool) -> None:
        leaf = query.float().requires_grad_(backward)
        out = attend(scores_of(leaf, keys), keys, visible, sinks)
        if backward:
            out.sum().backward()

    for backward in (False, True):
        with torch.set_grad_enabled(backward):
            found = [
                milliseconds(lambda a=attend, b=backward: step(a, b), device, repeats)
                for attend in (rounded, unrounded)
            ]
        label = "forward and backward" if backward else "forward"
        print(f"{label}: {found[0]:.2f} ms with BF16 weights, {found[1]:.2f} without, ratio {found[0] / found[1]:.2f}")


def read_options() -> argparse.Namespace:
    """Options of the command line, of which this machine can do what they ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="compare with FlashMLA's kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=at_least(1), default=256)
    parser.add_argument("--repeats", type=at_least(1), default=10)
    options = parser.parse_args()
    if options.vllm and importlib.util.find_spec("vllm") is None:
        parser.error("--vllm: no vllm in this environment; wanted vLLM 0.26.0, start it with that one's interpreter")
    if options.vllm and not torch.cuda.is_available():
        parser.error("--vllm: torch sees 0 GPUs here; wanted a Hopper GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu")
    return options


def main() -> int:
    """Run one of the two comparisons."""
    options = read_options()
    if options.vllm:
        compare_with_vllm()
    else:
        compare_times(options.device, options.tokens, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --tokens"))
