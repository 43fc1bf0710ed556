"""What recording, comparing and replaying routes costs, and what replay removes from the mismatch, on a CPU.

    uv run benchmarks/router_replay.py results/checkpoints/dsv4-tiny-HASH [--json]

One process: the reference engine rolls out random prompts with the numerics of `--profile`, AutoModel policies score
and train the same tokens. Times are CPU seconds of the process, the least of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.grpo.metrics import rollout_train_k3
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import Meshes, ParallelSizes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.routes import RouterMode, pack_routes
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss

PROMPT, NEW = 32, 32


def rollout(engine: ReferenceEngine, rows: int, vocab: int) -> dict[str, torch.Tensor]:
    """A training batch of `rows` sequences of 64 tokens, with the engine's routes if it records them."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocab, (rows, PROMPT), generator=generator)
    done = engine.generate(prompts.tolist(), SamplingParams(NEW), seed=1)
    data = {
        "input_ids": torch.cat([prompts, torch.tensor([c.tokens for c in done])], dim=1),
        "input_lengths": torch.full((rows,), PROMPT + NEW),
        "token_mask": torch.cat([torch.zeros(rows, PROMPT), torch.ones(rows, NEW)], dim=1),
        "sample_mask": torch.ones(rows),
        "generation_logprobs": torch.cat([torch.zeros(rows, PROMPT), torch.tensor([c.logprobs for c in done])], dim=1),
    }
    if engine.route_capture is not None:
        data["routed_experts"] = pack_routes([c.routed_experts for c in done], [PROMPT + NEW] * rows, PROMPT + NEW)
    return data


def cpu_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The least CPU seconds of this process over `repeats` calls, after one to warm up."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def measure(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Seconds of the engine with and without capture; k3, overlap and seconds of a training step of each policy."""
    config = read_config(args.checkpoint, {})
    state = read_release_checkpoint(args.checkpoint)
    profile = get_profile(args.profile)
    for capture in (False, True):
        engine = ReferenceEngine(config, profile, experts="grouped_mm", capture_routes=capture)
        engine.update_weights(export_weights(state, args.profile, unquantized=torch.float32))
        seconds = cpu_seconds(lambda engine=engine: rollout(engine, args.rows, config["vocab_size"]), args.repeats)
        yield f"engine, capture {'on' if capture else 'off'}", {"seconds": seconds}
    data = rollout(engine, args.rows, config["vocab_size"])
    for mode in (False, True):
        for router in RouterMode:
            model = build_model(automodel_config(config), routing_weight_after_down=mode, seed=0)
            model.load_state_dict(state)
            worker = PolicyWorker(
                model,
                Meshes(ParallelSizes(1)),
                profile=profile,
                fake_quant=dict.fromkeys(SWITCHES, mode),
                micro_batch_size=args.rows,
                logprob_batch_size=args.rows,
                optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 0.0, "weight_decay": 0.0}},
                router=router,
            )
            yield f"{'qat' if mode else 'bf16'}, routes {router.value}", measure_worker(worker, data, args.repeats)


def measure_worker(worker: PolicyWorker, data: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """k3 against the rollout, the tally of a training step, and the step's seconds. The learning rate is 0."""
    mask = data["token_mask"] > 0
    difference = rollout_train_k3(worker.get_logprobs(data)["logprobs"].double(), data["generation_logprobs"].double())
    found = {"k3": float(difference[mask].mean())}
    sizes = {"global_valid_seqs": len(mask), "global_valid_tokens": float(mask.sum())}
    result = worker.train(data, DemonstrationLoss(), **sizes)
    if "router" in result:
        found |= {name.removeprefix("router_"): value for name, value in result["router"].metrics().items()}
    found["seconds"] = cpu_seconds(lambda: worker.train(data, DemonstrationLoss(), **sizes), repeats)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print one line a configuration, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="release-format folder, such as the tiny recipes make")
    parser.add_argument("--profile", default="vllm-hopper", help="numerics of the rollout (default vllm-hopper)")
    parser.add_argument("--rows", type=at_least(1), default=32, help="sequences (default 32)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="timed repetitions (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)

    def command() -> int:
        torch.set_num_threads(1)
        rows = {}
        for name, values in measure(args):
            rows[name] = values
            line = f"{name:24s}" + "  ".join(f"{key} {value:.4g}" for key, value in values.items())
            print(line, file=sys.stderr if args.json else sys.stdout, flush=True)
        if args.json:
            print(json.dumps(rows, indent=2))
        return 0

    return guarded(command, lower="lower --rows")


if __name__ == "__main__":
    sys.exit(main())
