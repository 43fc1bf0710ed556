"""Does a vLLM engine's decoding depend on how many sequences run beside it? One GPU, vLLM's own environment.

    python benchmarks/vllm_batches.py DIR                                   DIR: a checkpoint in release format
    python benchmarks/vllm_batches.py DIR --set async_scheduling=false      with another engine argument

Sequences of one start end one after another, so the batch shrinks from --rows to 1. The logprobs of decoding are
compared with those of one prefill of the same tokens, by the number of sequences that ran when a token was sampled. An
engine whose two ways of computing part only where few sequences run has a fault in its kernels for small batches: the
trainer's importance ratios of the longest responses are then wrong, and some logprobs may be NaN.

Exit status 1: the mean difference of some batch size is more than --limit times that of the largest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, positive

from nemo_rl_dsv4.cli.guard import FINDING, OK, guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.vllm_engine import VllmEngine
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec
from nemo_rl_dsv4.model.hf_config import read_config

SMALL = 8
"""Batch sizes up to this have a line of their own; larger ones are put together by powers of two."""


def running(lengths: list[int], index: int) -> int:
    """Sequences whose token `index` is sampled together with that of the longest."""
    return sum(length > index for length in lengths)


def by_batch_size(
    lengths: list[int], decoded: list[list[float]], prefilled: list[list[float]]
) -> dict[int, dict[str, float]]:
    """Differences of logprobs by the number of sequences that ran.

    Args:
        lengths: tokens of each response.
        decoded: their logprobs as sampled.
        prefilled: their logprobs by prefill.

    Returns:
        batch size (largest of its group) -> `tokens`, `nan` (how many logprobs of decoding), `mean` and `largest`
        absolute difference of the others.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for row, values in enumerate(decoded):
        for index, value in enumerate(values):
            size = running(lengths, index)
            size = size if size <= SMALL else 1 << (size - 1).bit_length()
            groups[size].append(abs(value - prefilled[row][index]))
    table = {}
    for size in sorted(groups):
        finite = [value for value in groups[size] if value == value]
        table[size] = {
            "tokens": len(groups[size]),
            "nan": len(groups[size]) - len(finite),
            "mean": fmean(finite) if finite else float("nan"),
            "largest": max(finite, default=float("nan")),
        }
    return table


def measure(engine: VllmEngine, vocabulary: int, rows: int, spacing: int, prompt: int, seed: int) -> dict:
    """Decode rows of `spacing`, 2 x `spacing`, ... tokens behind random prompts, and prefill what came out."""
    from importlib import import_module

    parameters = import_module("vllm").SamplingParams
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, vocabulary, (prompt,), generator=generator).tolist() for _ in range(rows)]
    lengths = [spacing * (row + 1) for row in range(rows)]
    wanted: list[Any] = [
        parameters(max_tokens=n, min_tokens=n, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False, seed=i)
        for i, n in enumerate(lengths)
    ]
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    sequences, decoded = [], []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        sequences.append([*output.prompt_token_ids, *tokens])
        positions = zip(output.outputs[0].logprobs, tokens, strict=True)
        decoded.append([float(position[token].logprob) for position, token in positions])
    scores = engine.score(sequences)
    prefilled = [score[len(score) - length :] for score, length in zip(scores, lengths, strict=True)]
    return by_batch_size(lengths, decoded, prefilled)


def main() -> int:
    """Start the engine, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--rows", type=at_least(1), default=32, help="sequences at the start (32)")
    parser.add_argument("--spacing", type=at_least(1), default=8, help="tokens between the ends of two sequences (8)")
    parser.add_argument("--prompt", type=at_least(1), default=27, help="tokens of a prompt (27)")
    parser.add_argument("--profile", default="vllm-hopper", help="rollout profile (vllm-hopper)")
    parser.add_argument("--limit", type=positive, default=3.0, help="ratio of means that counts as a fault (3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="argument of vLLM's engine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    own = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--set {item!r}: wanted KEY=VALUE, such as async_scheduling=false")
        try:
            own[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(
                f"--set {item!r}: {value!r} is no YAML value; wanted one such as false, 3 or text"
            ) from error
    longest = options.prompt + options.rows * options.spacing
    spec = VllmSpec(
        str(options.checkpoint),
        options.profile,
        kv_cache_dtype="fp8_ds_mla",
        max_model_len=max(512, longest + 1),
        max_num_seqs=max(64, options.rows),
        gpu_memory_utilization=0.1,
        engine_arguments={"kv_cache_memory_bytes": 4_000_000_000, **own},
        environment={"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"},
    )
    vocabulary = int(read_config(options.checkpoint, {})["vocab_size"])
    engine = VllmEngine(spec)
    table = measure(engine, vocabulary, options.rows, options.spacing, options.prompt, seed=0)
    if options.json:
        print(json.dumps({"vllm": engine.version, "arguments": own, "batches": table}))
    else:
        print(f"vLLM {engine.version} {own or ''}\nsequences  tokens  NaN   mean |difference|   largest")
        for size, row in table.items():
            print(f"{size:9}  {row['tokens']:6}  {row['nan']:3}   {row['mean']:.4f}              {row['largest']:.3f}")
    reference = table[max(table)]["mean"]
    faulty = [size for size, row in table.items() if row["nan"] or row["mean"] > options.limit * reference]
    return FINDING if faulty else OK


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --rows, --spacing or --prompt"))
