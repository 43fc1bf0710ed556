"""Peak memory and time of token log-probabilities, forward and backward: chunked head against all logits at once.

    python benchmarks/logprobs.py                       # a GPU: 8192 tokens, hidden 4096, vocabulary 129280, BF16
    python benchmarks/logprobs.py --tokens 1024 --vocab 32768 --hidden 256     # also on a CPU

Each case runs in a process of its own. Memory is the peak above what operands and gradients of the weight hold before
the pass: `torch.cuda.max_memory_allocated` on a GPU, the growth of the process's peak resident set on a CPU (which the
allocator may round up). `--json` prints one object a case.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import FAILED, OK, guarded
from nemo_rl_dsv4.model.token_logprobs import AUTOMODEL_HEAD, chunked_token_logprobs, head_logits, token_logprobs


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; sizes default to the released model's on a GPU and to small ones on a CPU."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(1), default=8192 if on_gpu else 1024)
    parser.add_argument("--vocab", type=at_least(1), default=129280 if on_gpu else 32768)
    parser.add_argument("--hidden", type=at_least(1), default=4096 if on_gpu else 256)
    parser.add_argument(
        "--chunks", type=at_least(0), nargs="+", default=[0, 256, 1024, 4096] if on_gpu else [0, 64, 256]
    )
    parser.add_argument("--repeats", type=at_least(1), default=5 if on_gpu else 2)
    parser.add_argument("--case", type=at_least(0), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one case in this process: `args.case` positions at a time, 0 for all at once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "generator": generator}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(args.tokens, args.hidden, **options).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, **options) / args.hidden**0.5).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    targets = torch.randint(0, args.vocab, (args.tokens,), **options)

    def logprobs() -> torch.Tensor:
        if args.case == 0:
            return token_logprobs(head_logits(hidden, weight, AUTOMODEL_HEAD), targets)
        return chunked_token_logprobs(hidden, weight, targets, chunk_size=args.case)

    def timed(run) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def score() -> None:
        with torch.no_grad():
            logprobs()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else peak_bytes(device)
    score()
    scoring_peak = peak_bytes(device) - before
    logprobs().sum().backward()
    training_peak = peak_bytes(device) - before
    return {
        "tokens": args.tokens,
        "vocab": args.vocab,
        "hidden": args.hidden,
        "chunk_size": args.case,
        "scoring_peak_bytes": scoring_peak,
        "training_peak_bytes": training_peak,
        "scoring_seconds": min(timed(score) for _ in range(args.repeats)),
        "training_seconds": min(timed(lambda: logprobs().sum().backward()) for _ in range(args.repeats)),
    }


def main() -> int:
    """Run every case in its own process and print a table."""
    args = parse()
    if args.case is not None:
        print(json.dumps(measure(args)))
        return OK
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if not args.json:
        print(
            f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, {device}, torch {torch.__version__}"
        )
        print("| chunk | scoring peak MB | training peak MB | scoring ms | training ms |\n|---|---|---|---|---|")
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocab", "hidden", "repeats")]
    for chunk in args.chunks:
        command = [sys.executable, __file__, *sizes, f"--case={chunk}"]
        case = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if case.returncode:  # it has said why, unless the kernel ended it
            killed = f"killed by signal {-case.returncode}; " if case.returncode < 0 else ""
            print(f"error: {killed}the case of chunk {chunk} ended without a result", file=sys.stderr)
            return FAILED
        result = json.loads(case.stdout.splitlines()[-1])
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        cells = [
            chunk or "all at once",
            *(f"{result[name] / 1e6:.0f}" for name in ("scoring_peak_bytes", "training_peak_bytes")),
            *(f"{result[name] * 1e3:.1f}" for name in ("scoring_seconds", "training_seconds")),
        ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return OK


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --tokens, --vocab or --hidden"))
