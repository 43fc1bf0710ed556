"""Random settings, batches and orders of calls on one training process and on two: their numbers must agree.

    python benchmarks/fuzz_layouts.py --cases 40 [--seed 0]
    python benchmarks/fuzz_layouts.py --only 16 17                # two cases again, each call with its numbers

Every case draws a layout of two ranks, settings of the loss, of micro-batches, packing, checkpointing, logits and
router replay, ragged batches (rows that count nothing among them), and a sequence of calls: score the current and the
reference policy, update, export, sleep, save and restore. Both sides make the same calls, on gloo and CPUs, in float32
without rounding, where all layouts compute the same but for the order of additions. Weights move by SGD, which does not
blow up last bits as AdamW's first step does. Exits 1 if any number is farther off than its tolerance.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import at_least
from parity import CONFIG, VOCAB, random_weights

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import LossSettings
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.policy.packing import Packing
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec
from nemo_rl_dsv4.routes import RouterMode

LAYOUTS = {
    "replicated2": ParallelSizes(2, replicate=2),
    "dp2": ParallelSizes(2),
    "dp2ep2": ParallelSizes(2, ep=2),
    "cp2ep2": ParallelSizes(2, cp=2, ep=2),
}
TOLERANCE = {"logprobs": 2e-4, "loss": 2e-4, "grad_norm": 2e-3, "weights": 2e-5}
"""Absolute, but for the relative one of gradient norms."""
CALLS = ("score", "reference", "train", "export", "sleep", "checkpoint")
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One draw; `drawn` is what its page of output shows."""

    layout: str
    settings: dict[str, Any]
    loss: LossSettings
    global_batch_size: int
    calls: tuple[str, ...]
    batches: list[Batch] = field(repr=False)


def draw_batch(rng: random.Random, rows: int, hashed: torch.Tensor | None) -> Batch:
    """Ragged rows of up to 300 tokens; some rows, but not all, count nothing.

    Args:
        rng: draws.
        rows: number of rows.
        hashed: the experts of each token id in the hashed first layer; None leaves out what an engine chose.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    longest = rng.choice((40, 150, 300))
    lengths = torch.tensor([rng.randint(8, longest) for _ in range(rows)])
    width = int(lengths.max()) + rng.choice((0, 0, 7))
    inside = torch.arange(width) < lengths.unsqueeze(1)
    prompts = torch.tensor([rng.randint(1, int(length) - 1) for length in lengths])
    sample_mask = torch.tensor([float(rng.random() < 0.8) for _ in range(rows)])
    sample_mask[rng.randrange(rows)] = 1.0
    batch = {
        "input_ids": torch.where(inside, torch.randint(3, VOCAB, (rows, width), generator=generator), 1),
        "input_lengths": lengths,
        "token_mask": (inside & (torch.arange(width) >= prompts.unsqueeze(1))).float(),
        "sample_mask": sample_mask,
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
        "noise": 0.05 * torch.randn(rows, width, generator=generator),
    }
    if hashed is not None:
        layers, experts, top_k = CONFIG["num_hidden_layers"], CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
        scores = torch.rand(rows, width, layers, experts, generator=generator)
        chosen = scores.argsort(-1)[..., :top_k].to(torch.int16)
        chosen[:, :, 0] = hashed[batch["input_ids"]].to(torch.int16)
        chosen[torch.arange(width) >= lengths.unsqueeze(1) - 1] = -1
        batch["routed_experts"] = chosen
    return batch


def draw(seed: int, number: int, hashed: torch.Tensor) -> Case:
    """Case `number` of a seed; for `hashed` see `draw_batch`."""
    rng = random.Random(f"{seed}-{number}")
    router = rng.choice((RouterMode.OWN, RouterMode.OWN, RouterMode.REPLAY, RouterMode.COMPARE))
    penalty = rng.choice((0.0, 0.1))
    token_level = rng.random() < 0.5
    settings = {
        "micro_batch_size": rng.choice((1, 2, 4)),
        "logprob_batch_size": rng.choice((1, 3, 4)),
        "activation_checkpointing": rng.random() < 0.5,
        "logprob_chunk_size": rng.choice((None, 16, 100)),
        "packing": rng.choice((None, None, Packing(512, 768), Packing(384, 384, "concatenative"))),
        "sequence_multiple": rng.choice((1, 1, 64)),
        "max_grad_norm": rng.choice((0.5, None)),
        "keep_reference": True,
        "router": router,
        "offload_optimizer_for_logprob": rng.random() < 0.3,
        "trainer_sleep": True,
        "optimizer": {
            "name": "torch.optim.SGD",
            "kwargs": {"lr": 0.05, "momentum": rng.choice((0.0, 0.9)), "weight_decay": rng.choice((0.0, 0.01))},
        },
    }
    loss = LossSettings(
        token_level_loss=token_level,
        sequence_level_importance_ratios=not token_level and rng.random() < 0.5,
        reference_policy_kl_penalty=penalty,
        reference_policy_kl_type=rng.choice(("k1", "k2", "k3")),
        ratio_clip_c=rng.choice((None, 3.0)),
        use_importance_sampling_correction=rng.random() < 0.5,
    )
    size = rng.choice((4, 8))
    table = None if router is RouterMode.OWN else hashed
    batches = [draw_batch(rng, size * rng.choice((1, 1, 2)), table) for _ in range(3)]
    calls = tuple(rng.choice(CALLS) for _ in range(rng.randint(4, 9)))
    return Case(rng.choice(list(LAYOUTS)), settings, loss, size, calls, batches)


class Engines:
    """Takes weights and keeps their checksum alone."""

    checksum = ""

    def update_weights(self, shipment: Any) -> dict[str, float]:
        """As an engine group's."""
        import ray

        self.checksum = (ray.get(shipment) if isinstance(shipment, ray.ObjectRef) else shipment).checksum
        return {}


def train(group: PolicyGroup, case: Case, batch: Batch) -> dict[str, torch.Tensor]:
    """Score what the loss needs in its place in the loop, and update."""
    data = dict(batch)
    noise = data.pop("noise")
    numbers = {}
    if case.loss.reference_policy_kl_penalty:
        data["reference_policy_logprobs"] = group.get_reference_policy_logprobs(data)["reference_logprobs"]
        numbers["reference logprobs"] = data["reference_policy_logprobs"]
    data["prev_logprobs"] = numbers["logprobs"] = group.get_logprobs(data)["logprobs"]
    data["generation_logprobs"] = data["prev_logprobs"] + noise
    if data["sample_mask"].view(-1, case.global_batch_size).sum(1).min() == 0:
        return numbers  # an update in which nothing counts has no loss
    out = group.train(data, ClippedPGLoss(case.loss))
    return {**numbers, "loss": out["loss"], "grad_norm": out["grad_norm"]}


def run(group: PolicyGroup, case: Case, checkpoint: Path, folder: Path) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """The numbers of each call."""
    sizes = ParallelSizes(1) if group.world == 1 else LAYOUTS[case.layout]
    spec = PolicySpec(
        checkpoint=str(checkpoint),
        sizes=sizes,
        profile="vllm-hopper",
        fake_quant=dict.fromkeys(SWITCHES, False),
        precision="float32",
        backend=CPU_BACKEND,
        **case.settings,
    )
    group.build(spec, global_batch_size=case.global_batch_size)
    found, engines, trained = [], Engines(), 0
    for number, call in enumerate(case.calls):
        batch = case.batches[trained % len(case.batches)]
        plain = {name: value for name, value in batch.items() if name != "noise"}
        numbers: dict[str, torch.Tensor] = {}
        if call == "score":
            numbers["logprobs"] = group.get_logprobs(plain)["logprobs"]
        elif call == "reference":
            numbers["reference logprobs"] = group.get_reference_policy_logprobs(plain)["reference_logprobs"]
        elif call == "train":
            numbers = train(group, case, batch)
            trained += 1
        elif call == "export":
            group.export_to(engines)
        elif call == "sleep":
            group.sleep()
        else:
            saved = folder / f"{group.world}-{number}"
            group.save_checkpoint(saved)()
            numbers = train(group, case, batch)
            group.load_checkpoint(saved)
        found.append((call, numbers))
    return [*found, ("end", {f"weights {name}": value for name, value in sorted(group.full_state_dict().items())})]


def distance(name: str, one: torch.Tensor, two: torch.Tensor) -> float:
    """How far two sides are apart in units of the tolerance."""
    kind = name.removeprefix("reference ").partition(" ")[0]
    if one.shape != two.shape or not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    off = (one.double() - two.double()).abs()
    if kind == "grad_norm":
        off = off / one.double().abs().clamp_min(1e-3)
    return float(off.max()) / TOLERANCE[kind]


def compare(
    one: list[tuple[str, dict[str, torch.Tensor]]],
    two: list[tuple[str, dict[str, torch.Tensor]]],
    say: Callable[[str], None] = lambda _: None,
) -> float:
    """Largest distance over all calls."""
    worst = 0.0
    for number, ((call, expected), (_, found)) in enumerate(zip(one, two, strict=True)):
        if expected.keys() != found.keys():
            return float("inf")
        for name, value in expected.items():
            off = distance(name, value, found[name])
            if off > 1 or not name.startswith("weights"):
                say(f"  call {number} {call}: {name} {off:.3f} of its tolerance")
            worst = max(worst, off)
    return worst


def describe(case: Case) -> str:
    """One line."""
    settings = {key: value for key, value in case.settings.items() if value not in (None, False)}
    loss = {key: value for key, value in asdict(case.loss).items() if value != getattr(LossSettings(), key)}
    shapes = [tuple(batch["input_ids"].shape) for batch in case.batches]
    return (
        f"{case.layout}, calls {' '.join(case.calls)}, batches {shapes} of {case.global_batch_size}, {settings}, {loss}"
    )


def main() -> int:
    """Run the cases; exit status 1 if any number of any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=at_least(1), default=20, help="number of cases (20)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the draws (0)")
    parser.add_argument("--only", type=at_least(0), nargs="+", help="run these cases alone, in this order, in detail")
    arguments = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=40)
    groups = {1: PolicyGroup(1), 2: PolicyGroup(2)}
    numbers = arguments.only or range(arguments.cases)
    bad, worst, started = [], 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = random_weights(dict(build_model(automodel_config(CONFIG)).state_dict()))
        write_release_checkpoint(state, CONFIG, folder / "model", expert_format="fp8")
        for number in numbers:
            case = draw(arguments.seed, number, state["model.layers.0.mlp.gate.tid2eid"])
            try:
                sides = [run(groups[world], case, folder / "model", folder / str(number)) for world in (1, 2)]
                said: list[str] = []
                off = compare(*sides, say=said.append)
                if off > 1 or arguments.only:
                    print("\n".join(said), flush=True)
            except (RuntimeError, UserError, ValueError, KeyError, AssertionError) as error:
                off = float("inf")
                print(f"case {number} raised {str(error).strip().splitlines()[-1]}", flush=True)
            worst = max(worst, off)
            verdict = "agrees" if off <= 1 else "DIFFERS"
            print(f"case {number} {verdict} ({off:.3f} of the tolerance): {describe(case)}", flush=True)
            bad += [number] if off > 1 else []
    for group in groups.values():
        group.shutdown()
    ray.shutdown()
    seconds = time.monotonic() - started
    print(f"{len(numbers)} cases of seed {arguments.seed} in {seconds:.0f} s, {len(bad)} differ {bad or ''}")
    print(f"largest distance: {worst:.3f} of the tolerance")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
