"""Roll out on an engine, score with trainers that align one thing more or less, and put it together.

Trainers live in this process and hold the whole model: this is for models that fit one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.mismatch.engines import CpuEngine, RolloutEngine, captured
from nemo_rl_dsv4.mismatch.measure import Mismatch, by_position, compare, worst_tokens
from nemo_rl_dsv4.mismatch.rollout_file import Rollout
from nemo_rl_dsv4.mismatch.study import EVERYTHING, FP8_PRODUCTS, REPLAY, Study, Variant
from nemo_rl_dsv4.mismatch.summation import OtherSums
from nemo_rl_dsv4.mismatch.trainers import Trainer, trainers_of
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model, resolve_dtype
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit.export import export_weights
from nemo_rl_dsv4.routes import ROUTED_EXPERTS, RouterMode, pack_routes

LAYER_ROWS = 8
"""Sequences whose hidden states are compared layer by layer."""


@dataclass(frozen=True)
class Model:
    """The weights of a study and how both sides run them.

    Attributes:
        hf_config: official config.json.
        state: weights under AutoModel's names.
        profile: name of the rollout profile.
        precision: `float32` or `bfloat16`, on both sides.
        backend: AutoModel backend fields.
        rows: sequences of one forward pass.
        device: `cpu` or `cuda`, of the trainers.
    """

    hf_config: Mapping[str, Any]
    state: Mapping[str, Tensor]
    profile: str
    precision: str = "float32"
    backend: Mapping[str, Any] = field(default_factory=lambda: dict(CPU_BACKEND))
    rows: int = 32
    device: str = "cpu"


def add_noise(state: Mapping[str, Tensor], relative: float, seed: int = 0) -> dict[str, Tensor]:
    """Weights moved by Gaussian noise of `relative` times their own standard deviation, as training would move them.

    A checkpoint in FP8 is its own rounding: without noise the rounding of weights has no effect to measure.
    """
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, value in state.items():
        if value.is_floating_point() and value.ndim >= 2 and relative > 0:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.device)
            value = (value.float() + noise * (relative * value.float().std())).to(value.dtype)
        moved[name] = value
    return moved


def exported(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The model's weights as a refit brings them: quantized in the dtype that the trainers compute in.

    Quantizing float32 weights for the engine and their BF16 values in a trainer would give one weight in thirty another
    code.
    """
    if model.precision == "float32":
        return export_weights(model.state, model.profile, unquantized=torch.float32)
    built = build_model(
        automodel_config(dict(model.hf_config)),
        backend=CPU_BACKEND,
        dtype=resolve_dtype(model.precision),
        device=torch.device("meta"),
    )
    dtypes = {name: value.dtype for name, value in built.state_dict().items()}
    state = {name: value.to(dtypes[name]) for name, value in model.state.items()}
    return export_weights(state, model.profile, unquantized=torch.bfloat16)


def start_engine(model: Model) -> CpuEngine:
    """The CPU reference engine with the model's weights."""
    engine = ReferenceEngine(
        model.hf_config,
        get_profile(model.profile),
        experts="grouped_mm",
        capture_routes=True,
        dtype=resolve_dtype(model.precision),
    )
    engine.update_weights(exported(model))
    return CpuEngine(engine, model.rows)


def roll_out(
    engine: RolloutEngine,
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    responses: int,
    params: SamplingParams,
    pad_id: int,
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Rollout:
    """Sample `responses` continuations of every prompt and score them once more by prefill.

    Args:
        engine: from `start_engine`.
        model: for the record.
        prompts: token ids.
        responses: of each prompt.
        params: how to sample.
        pad_id: fills rows.
        seed: of the sampling.
        advance: called with the number of sequences finished.
    """
    repeated = [list(prompt) for prompt in prompts for _ in range(responses)]
    done = []
    share = engine.rows or len(repeated)
    for start in range(0, len(repeated), share):
        part = repeated[start : start + share]
        ids = list(range(start, start + len(part)))
        done += engine.generate(part, params, seed=seed, request_ids=ids)
        advance(len(part))
    width = max(len(prompt) + len(c.tokens) for prompt, c in zip(repeated, done, strict=True))
    input_ids = torch.full((len(done), width), pad_id, dtype=torch.int64)
    logprobs = torch.zeros(len(done), width)
    for row, (prompt, completion) in enumerate(zip(repeated, done, strict=True)):
        end = len(prompt) + len(completion.tokens)
        input_ids[row, :end] = torch.tensor(prompt + completion.tokens)
        logprobs[row, len(prompt) : end] = torch.tensor(completion.logprobs)
    prompt_lengths = torch.tensor([len(prompt) for prompt in repeated])
    lengths = prompt_lengths + torch.tensor([len(c.tokens) for c in done])
    rollout = Rollout(
        {
            "input_ids": input_ids,
            "prompt_lengths": prompt_lengths,
            "lengths": lengths,
            "logprobs": logprobs,
            "prompt": torch.arange(len(prompts)).repeat_interleave(responses),
            "prefill_logprobs": engine.score(input_ids, lengths),
            ROUTED_EXPERTS: pack_routes([c.routed_experts for c in done], lengths.tolist(), width),
        },
        {
            "engine": engine.name,
            "profile": model.profile,
            "precision": model.precision,
            "temperature": params.temperature,
            "seed": seed,
        },
    )
    mask = rollout.response_mask
    prefill = torch.where(mask, rollout.tensors["prefill_logprobs"], 0.0)
    return Rollout({**rollout.tensors, "prefill_logprobs": prefill}, rollout.engine)


def build_trainer(model: Model, trainer: Trainer) -> PolicyWorker:
    """A policy of one process with the model's weights and this trainer's numerics."""
    worker = build_worker(
        PolicySpec(
            checkpoint=None,
            hf_config=model.hf_config,
            sizes=ParallelSizes(1),
            profile=model.profile,
            fake_quant=trainer.fake_quant,
            fp8=trainer.fp8,
            alignment=trainer.alignment,
            precision=model.precision,
            backend=model.backend,
            micro_batch_size=model.rows,
            logprob_batch_size=model.rows,
            optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 0.0}},
            router=RouterMode.REPLAY if trainer.replay else RouterMode.OWN,
            device=model.device,
        )
    )
    worker.model.load_state_dict(model.state)
    return worker


def score(worker: PolicyWorker, rollout: Rollout, *, replay: bool) -> tuple[Tensor, float | None]:
    """Training logprobs float32 [N, S] of a rollout and, under replay, the share of experts chosen alike."""
    data = {"input_ids": rollout.tensors["input_ids"], "input_lengths": rollout.tensors["lengths"]}
    if replay:
        data[ROUTED_EXPERTS] = rollout.tensors[ROUTED_EXPERTS]
    logprobs = worker.get_logprobs(data)["logprobs"].cpu()
    if not replay or worker.router is None:
        return logprobs, None
    return logprobs, worker.router.take_tally().metrics().get("router_overlap")


def study_of(
    model: Model,
    rollout: Rollout,
    *,
    engine: RolloutEngine | None = None,
    trainers: Sequence[Trainer] | None = None,
    advance: Callable[[str], None] = lambda name: None,
) -> Study:
    """Score a rollout with every trainer.

    Args:
        model: weights that the rollout was made with.
        rollout: what an engine sampled.
        engine: the engine that made it, for hidden states layer by layer; None leaves them out.
        trainers: default: all of `trainers_of`.
        advance: called with the name of each trainer that is done.
    """
    mask, prompts = rollout.response_mask, rollout.tensors["prompt"]
    r = rollout.tensors["logprobs"]

    def against(t: Tensor) -> Mismatch:
        return compare(r, t, mask, prompts)

    other_sums = replayed_other_sums = None
    if trainers is None:
        routes = ROUTED_EXPERTS in rollout.tensors
        profile = get_profile(model.profile)
        trainers = trainers_of(profile, model.precision, routes=routes, fp8=model.device == "cuda")
    prefill = rollout.tensors.get("prefill_logprobs")
    variants, positions, worst = [], [], []
    layers: list[dict[str, float]] = []
    for trainer in trainers:
        worker = build_trainer(model, trainer)
        t, overlap = score(worker, rollout, replay=trainer.replay)
        variants.append(Variant(trainer.name, trainer.kind, against(t), overlap))
        if trainer.name == REPLAY:
            with OtherSums():
                replayed_other_sums = compare(t, score(worker, rollout, replay=True)[0], mask, prompts)
        if trainer.name == EVERYTHING:
            start = rollout.tensors["prompt_lengths"]
            positions = by_position(*(_from_prompt(x, start) for x in (r, t, mask)))
            worst = worst_tokens(rollout.tensors["input_ids"], start, mask, rollout=r, trainer=t, prefill=prefill)
            with OtherSums():
                other_sums = compare(t, score(worker, rollout, replay=trainer.replay)[0], mask, prompts)
        if engine is not None and trainer.name == EVERYTHING:
            layers = compare_layers(engine, worker, rollout)
        elif engine is not None and trainer.name == FP8_PRODUCTS:
            for row, in_fp8 in zip(layers, compare_layers(engine, worker, rollout, other_sums=False), strict=True):
                row["fp8_products"] = in_fp8["relative_error"]
        del worker  # before the next one is built
        if model.device == "cuda":
            torch.cuda.empty_cache()  # the engine, and whatever else runs there, shares the GPU
        advance(trainer.name)
    return Study(
        engine=dict(rollout.engine),
        trainer={"profile": model.profile, "precision": model.precision, "backend": dict(model.backend)},
        variants=tuple(variants),
        floor=None if prefill is None else against(prefill),
        positions=tuple(positions),
        layers=tuple(layers),
        worst=tuple(worst),
        other_sums=other_sums,
        replayed_other_sums=replayed_other_sums,
    )


def _from_prompt(values_NS: Tensor, start_N: Tensor) -> Tensor:
    """Shift every row so that its response begins at column 0; what came before wraps to the end."""
    index = (torch.arange(values_NS.shape[1]) + start_N[:, None]) % values_NS.shape[1]
    return values_NS.gather(1, index)


def compare_layers(
    engine: RolloutEngine, worker: PolicyWorker, rollout: Rollout, *, other_sums: bool = True
) -> list[dict[str, float]]:
    """Cosine and relative error of hidden states after each layer, of prefill on both sides; with `other_sums` also the
    error that other sums alone make.

    Over sequences of the most common length. Empty if the two implementations keep hidden states in different shapes.
    """
    lengths = rollout.tensors["lengths"]
    length = int(lengths.mode().values)
    ids = rollout.tensors["input_ids"][lengths == length][:LAYER_ROWS, :length]
    own_layers: Any = worker.model.model.layers  # type: ignore[union-attr]
    own = list(own_layers.values()) if hasattr(own_layers, "values") else list(own_layers)
    left = engine.hidden_states(ids)
    batch = {"input_ids": ids, "input_lengths": torch.full((len(ids),), length)}
    with captured(own) as right:
        worker.get_logprobs(batch)
    rows = []
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            return []
        x, y = a.flatten(2).double(), b.flatten(2).double()
        cosine = float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean())
        rows.append({"layer": number, "cosine": cosine, "relative_error": float((x - y).norm() / x.norm())})
    if other_sums:
        with captured(own) as moved, OtherSums():
            worker.get_logprobs(batch)
        for row, b, c in zip(rows, right, moved, strict=True):
            row["other_sums"] = float((b.double() - c.double()).norm() / b.double().norm())
    return rows
