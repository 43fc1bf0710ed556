"""What each alignment switch and each rounding group is worth: mismatch of trainer and rollout on a CPU.

    uv run benchmarks/alignment.py results/checkpoints/dsv4-tiny-HASH
    uv run benchmarks/alignment.py results/checkpoints/dsv4-tiny-HASH --precision float32 --json

The folder is a checkpoint of the tiny model, which the tiny recipe makes on its first run. The rollout is the CPU
reference engine (transformers) with the profile's numerics; it samples answers to word problems and scores them. The
trainer (AutoModel) scores the same tokens with every switch as the profile says, with one off, with one on alone, and
without rounding. The model gets a YaRN section (factor 16, original length 64), which the tiny config lacks,
so that `yarn_on_window_layers` has something to stretch, and its weights move by `--noise` relative noise, as training
moves them off the checkpoint's FP8 and BF16 grid.

k1 = mean(r - t), k3 = mean(exp(t - r) - 1 - (t - r)), probs diff = mean |exp t - exp r| over response tokens, r rollout
and t training log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, not_negative

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.data.chat import encode_chat, prompt_messages
from nemo_rl_dsv4.data.datasets import build_dataset
from nemo_rl_dsv4.data.tokenizer import load_tokenizer
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.grpo.metrics import mismatch_metrics
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model, resolve_dtype
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.qat import SWITCHES as SITE_GROUPS
from nemo_rl_dsv4.model.qat import install_numerics
from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.numerics.alignment import DIFFERENCES, SWITCHES
from nemo_rl_dsv4.refit import export_weights

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
COLUMNS = {"k1": "rollout_corr/kl", "k3": "gen_kl_error", "probs diff": "training/rollout_probs_diff_mean"}


def moved(state: Mapping[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """float32 weights times 1 + noise * N(0, 1); integer tables as they are."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: value * (1 + noise * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in state.items()
    }


def sample(engine: ReferenceEngine, folder: Path, count: int, new_tokens: int) -> list[torch.Tensor]:
    """Batches [rows, prompt + new_tokens] of equal lengths: short prompts, and some longer than a 128-token window."""
    tokenizer = load_tokenizer(str(folder))
    section = {"dataset_name": "word_problems", "max_number": 10, "long_fraction": 0.2}
    problems = build_dataset(section, "validation", seed=0, size=20 * count)
    prompts = [tokenizer.encode(encode_chat(prompt_messages(problem.prompt))) for problem in problems]
    batches = []
    for group in ([p for p in prompts if len(p) < 128], [p for p in prompts if len(p) >= 128]):
        lengths = [len(p) for p in group]
        common = max(set(lengths), key=lengths.count)
        chosen = [p for p in group if len(p) == common][: count if common < 128 else max(2, count // 4)]
        answers = engine.generate(chosen, SamplingParams(new_tokens), seed=common)
        rows = [p + a.tokens for p, a in zip(chosen, answers, strict=True)]
        batches.append(torch.tensor(rows))
    return batches


def trainer_logprobs(
    config: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    args: argparse.Namespace,
    batches: list[torch.Tensor],
    rounding: Mapping[str, bool],
    alignment: Mapping[str, bool],
) -> list[torch.Tensor]:
    """float32 [rows, S] of each batch, position 0 zero, from a fresh AutoModel with these switches."""
    backend = {**CPU_BACKEND, "gate_precision": None}  # AutoModel's default, so that gate_fp32 has something to change
    model = build_model(automodel_config(config), backend=backend, dtype=resolve_dtype(args.precision), seed=0)
    model.load_state_dict(state)
    install_numerics(model, get_profile(args.profile), rounding, alignment)
    model.eval()
    scored = []
    with torch.no_grad():
        for ids in batches:
            logits = model(ids).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            scored.append(torch.nn.functional.pad(logprobs, (1, 0)))
    return scored


def mismatch(train: list[torch.Tensor], rollout: list[torch.Tensor], new_tokens: int) -> dict[str, float]:
    """k1, k3 and probability difference over the last `new_tokens` positions of every row."""
    t = torch.cat([x[:, -new_tokens:] for x in train])
    r = torch.cat([x[:, -new_tokens:] for x in rollout])
    found = mismatch_metrics(t, r, torch.ones_like(t), t.numel())
    return {label: float(found[name]) for label, name in COLUMNS.items()}


def variants() -> list[tuple[str, dict[str, bool], dict[str, bool]]]:
    """(label, rounding groups, alignment overrides) in the order of the table."""
    on, off = dict.fromkeys(SITE_GROUPS, True), dict.fromkeys(SITE_GROUPS, False)
    # Other RoPE frequencies are another function: without them nothing else can be seen, so they stay as the profile
    # has them in every row but their own. Rounding experts needs the routing weight after the down projection.
    automodel = {name: False for name in SWITCHES if name != "yarn_on_window_layers"}
    rounded = {**automodel, "routing_weight_after_down": True}
    rows = [("all as the profile", on, {}), ("rounding, no other switch", on, rounded)]
    for switch in SWITCHES:
        if switch == "routing_weight_after_down":
            rows.append(("all but rounding of experts", {**on, "experts": False}, {}))
            rows.append((f"the same, {switch} off", {**on, "experts": False}, {switch: False}))
            continue
        rows.append((f"{switch} off", on, {switch: False}))
        if switch != "yarn_on_window_layers":
            rows.append((f"{switch} on alone", on, {**rounded, switch: True}))
    rows += [(f"fake_quant.{group} off", {**on, group: False}, {}) for group in SITE_GROUPS]
    rows += [("aligned, nothing rounded", off, {}), ("nothing rounded, no other switch", off, automodel)]
    return rows


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a tiny checkpoint")
    parser.add_argument("--profile", default="vllm-hopper", help="rollout profile (default: vllm-hopper)")
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=at_least(1), default=32, help="short sequences; a quarter as many long ones")
    parser.add_argument("--new-tokens", type=at_least(1), default=32, help="sampled tokens a sequence")
    parser.add_argument(
        "--noise", type=not_negative, default=1e-3, help="relative noise on every weight (default: 1e-3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    config = read_config(args.checkpoint, {"rope_scaling": YARN})
    state = moved(read_release_checkpoint(args.checkpoint), args.noise)
    dtype = resolve_dtype(args.precision)
    engine = ReferenceEngine(config, get_profile(args.profile), dtype=dtype)
    # The trainer's parameters are in its precision, and those are what a refit sends.
    held = build_model(automodel_config(config), dtype=dtype, seed=0)
    held.load_state_dict(state)
    engine.update_weights(export_weights(held.state_dict(), args.profile, unquantized=dtype))
    batches = sample(engine, args.checkpoint, args.rows, args.new_tokens)
    rollout = [engine.score(ids) for ids in batches]
    rows = []
    for label, rounding, alignment in variants():
        started = time.perf_counter()
        train = trainer_logprobs(config, state, args, batches, rounding, alignment)
        rows.append({"trainer": label, **mismatch(train, rollout, args.new_tokens)})
        print(f"{label}: {rows[-1]['k3']:.3e} ({time.perf_counter() - started:.1f} s)", file=sys.stderr)
    tokens = sum(len(ids) for ids in batches) * args.new_tokens
    document = {"profile": args.profile, "precision": args.precision, "tokens": tokens, "rows": rows}
    if args.json:
        print(json.dumps(document))
        return 0
    print(f"{args.profile}, {args.precision}, {tokens} response tokens, torch {torch.__version__}\n")
    print("| trainer | k1 | k3 | probs diff |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['trainer']} | {row['k1']:+.2e} | {row['k3']:.2e} | {row['probs diff']:.2e} |")
    if args.precision == "float32":
        exact = [row.switch for row in DIFFERENCES if not row.float32]
        print(f"\nNo effect in float32 by construction: {', '.join(exact)}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --rows or --new-tokens"))
