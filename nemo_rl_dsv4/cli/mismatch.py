"""`nemo-rl-dsv4 mismatch --config RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_dsv4.cli.guard import FINDING, OK
from nemo_rl_dsv4.cli.run_grpo import silence_library_warnings
from nemo_rl_dsv4.errors import UserError

if TYPE_CHECKING:
    from nemo_rl_dsv4.config import MasterConfig

HELP = "Measure how far a trainer's probabilities are from the rollout's, and which rounding the distance comes from."
EXAMPLE = (
    "examples (after the tiny recipe has run once and made its checkpoint):\n"
    "  nemo-rl-dsv4 mismatch --config examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml\n"
    "  nemo-rl-dsv4 mismatch --config RECIPE policy.precision=bfloat16 --save-rollout rollout.safetensors\n"
    "  nemo-rl-dsv4 mismatch --config RECIPE --rollout rollout.safetensors     score what was sampled before\n"
    "on a GPU, with vLLM (the recipe's policy.generation.backend decides which engine rolls out):\n"
    "  nemo-rl-dsv4 mismatch --config examples/configs/recipes/llm/grpo-dsv4-mini-1n1g-automodel-qat.yaml\n\n"
    "exit status: 0 agreed, 1 the aligned trainer is farther away than --limit and than the engine's own floor (or "
    "no finite distance), 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--config", metavar="RECIPE", required=True, help="YAML file of the recipe")
    parser.add_argument("--checkpoint", metavar="DIR", type=_path, help="weights; left out: the recipe's model")
    parser.add_argument("--prompts", metavar="N", type=int, help="validation prompts (24)")
    parser.add_argument(
        "--random-prompts",
        metavar="MIN-MAX",
        help="prompts of that many random tokens instead of the recipe's, and no stop token: for random weights",
    )
    parser.add_argument("--responses", metavar="N", type=int, help="responses to each prompt (2)")
    parser.add_argument(
        "--noise",
        metavar="X",
        type=float,
        default=1e-3,
        help="move weights by X of their spread, as training would (0.001); an FP8 checkpoint is its own rounding",
    )
    parser.add_argument("--rollout", metavar="FILE", type=_path, help="score this rollout instead of sampling")
    parser.add_argument("--save-rollout", metavar="FILE", type=_path, help="keep what was sampled")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=_path,
        default=Path("results/mismatch"),
        help="folder of the report (results/mismatch)",
    )
    parser.add_argument("--limit", metavar="K3", type=float, default=1e-3, help="k3 that counts as agreed (0.001)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="Hydra overrides of the recipe")


def _path(text: str) -> Path:
    """A path that was written out: an empty word would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; wanted a path")
    return Path(text)


PROMPTS, RESPONSES = 24, 2


def run(options: argparse.Namespace) -> int:
    """Samples or reads a rollout, scores it with every trainer, writes and prints the study."""
    from nemo_rl_dsv4.config import load_config, validate
    from nemo_rl_dsv4.utils.console import make_console

    _check(options)
    config = load_config(Path(options.config), options.overrides)
    validate(config, runs_here=False)
    silence_library_warnings()
    console = make_console(stderr=True)
    study = _study(options, config, console)
    from nemo_rl_dsv4.mismatch.report import write_study

    files = write_study(study, options.out)
    if options.json:
        print(json.dumps({**study.to_dict(), "files": {name: str(path) for name, path in files.items()}}))
    else:
        _print(study, files)
    return FINDING if _too_far(study, options.limit) else OK


def _check(options: argparse.Namespace) -> None:
    for name, default in (("prompts", PROMPTS), ("responses", RESPONSES)):
        value = getattr(options, name)
        if value is not None and options.rollout is not None:
            raise UserError(f"--{name} is {value}, but --rollout {options.rollout} has its own; leave it out")
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; wanted 1 or more")
        setattr(options, name, default if value is None else value)
    if options.random_prompts is not None and options.rollout is not None:
        raise UserError(
            f"--random-prompts is {options.random_prompts}, but --rollout {options.rollout} has its own prompts; leave "
            "it out"
        )
    if options.random_prompts is not None:
        _lengths(options.random_prompts)
    if not (options.limit >= 0 and math.isfinite(options.limit)):
        raise UserError(f"--limit is {options.limit}; wanted a k3 of 0 or more, such as 0.001")
    if not 0 <= options.noise < 1:
        raise UserError(f"--noise is {options.noise}; wanted 0 or more, and less than 1")
    if options.rollout is not None and options.save_rollout is not None:
        raise UserError("--rollout reads a rollout and --save-rollout writes one; give one of them")
    if options.rollout is not None and not options.rollout.is_file():
        what = "no regular file" if options.rollout.exists() else "no such file"
        raise UserError(f"--rollout {options.rollout}: {what}; name one that --save-rollout wrote")
    _check_writable("--out", options.out)
    if options.save_rollout is not None:
        if options.save_rollout.is_dir():
            raise UserError(f"--save-rollout {options.save_rollout} is a folder; name a file in it")
        _check_writable("--save-rollout", options.save_rollout.parent, options.save_rollout)


def _check_writable(option: str, folder: Path, value: Path | None = None) -> None:
    """What is computed for minutes is not refused at its end: the folder, or the nearest above it, takes files.

    Args:
        option, folder: to be written.
        value: what was given, where that is not the folder.
    """
    value = value or folder
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"{option} {value}: {there} is no folder; name another place")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"{option} {value}: {there} takes no files ({error.strerror}); name another place") from error


def _lengths(text: str) -> tuple[int, int]:
    """`MIN-MAX` as two numbers."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise UserError(f"--random-prompts is {text!r}; wanted two lengths such as 16-700")
    return int(low), int(high)


def _study(options: argparse.Namespace, config: MasterConfig, console: Any) -> Any:
    import torch

    from nemo_rl_dsv4.config.prompts import make_datasets, make_prompts, make_tokenizer
    from nemo_rl_dsv4.mismatch.run import Model, add_noise, study_of
    from nemo_rl_dsv4.mismatch.trainers import trainers_of
    from nemo_rl_dsv4.model.hf_config import read_config
    from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint
    from nemo_rl_dsv4.numerics import get_profile
    from nemo_rl_dsv4.utils.progress import progress

    torch.set_num_threads(1)
    config, device = _on_this_machine(config)
    tokenizer = make_tokenizer(config)
    train_set, val_set = make_datasets(config)
    folder = options.checkpoint or _checkpoint_of(config, tokenizer)
    overrides = dict(config.policy.hf_config_overrides)
    with progress(console, f"reading {folder}"):
        state = read_release_checkpoint(folder, config_overrides=overrides)
        weights = _digest(state)
        state = add_noise({name: tensor.to(device) for name, tensor in state.items()}, options.noise, config.grpo.seed)
    backend = config.policy.dtensor_cfg.automodel_kwargs.backend
    model = Model(
        read_config(folder, overrides),
        state,
        config.policy.dsv4.rollout_profile,
        config.policy.precision,
        backend.model_dump(
            include={"attn", "linear", "rms_norm", "experts", "dispatcher", "rope_fusion", "gate_precision"}
        ),
        rows=config.policy.logprob_batch_size,
        device=device,
    )
    prompts = _prompts(options, config, tokenizer, model, make_prompts(config, tokenizer, train_set, val_set)[1])
    facts = _facts(options, config, model, weights)
    sampled = _sampled_before(options, model, facts)
    with _engine(config, model, tokenizer, folder, console, needed=sampled is None) as engine:
        said = {**facts, "checkpoint": folder.resolve().name}
        rollout = sampled or _roll_out(options, config, model, engine, tokenizer, prompts, console, said)
        trainers = trainers_of(
            get_profile(model.profile),
            model.precision,
            routes="routed_experts" in rollout.tensors,
            fp8=device == "cuda",
        )
        with progress(console, "scoring with one trainer after another", len(trainers)) as advance:
            return study_of(model, rollout, engine=engine, trainers=trainers, advance=lambda name: advance(1, name))


def _prompts(
    options: argparse.Namespace, config: MasterConfig, tokenizer: Any, model: Any, validation: Any
) -> list[list[int]]:
    """Token ids of the prompts: random, or the first of the recipe's validation set."""
    import torch

    if options.random_prompts is None:
        if options.rollout is None and len(validation) < options.prompts:
            raise UserError(f"--prompts is {options.prompts}; data.validation has {len(validation)}")
        prompts = [list(prompt.token_ids) for prompt in validation[: options.prompts]]
        if options.rollout is None:
            _check_vocabulary("data.validation with policy.tokenizer", max(map(max, prompts)), model.hf_config)
        return prompts
    low, high = _lengths(options.random_prompts)
    longest = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    if high > longest:
        raise UserError(
            f"--random-prompts is {options.random_prompts}; policy.max_total_sequence_length less max_new_tokens "
            f"leaves {longest} tokens for a prompt"
        )
    generator = torch.Generator().manual_seed(config.grpo.seed)
    lengths = torch.randint(low, high + 1, (options.prompts,), generator=generator).tolist()
    vocabulary = int(model.hf_config["vocab_size"])
    return [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _check_vocabulary(where: str, largest: int, hf_config: Mapping[str, Any]) -> None:
    """Token ids are rows of the checkpoint's embedding."""
    size = int(hf_config["vocab_size"])
    if largest >= size:
        raise UserError(
            f"{where} has token id {largest}, but the checkpoint's vocab_size is {size}: it is another model's; give "
            "the checkpoint and the tokenizer that belong together"
        )


def _on_this_machine(config: MasterConfig) -> tuple[MasterConfig, str]:
    """The recipe with its rollout profile resolved, and the device of the trainers."""
    import torch

    from nemo_rl_dsv4.numerics.devices import profile_of_device

    device = "cuda" if config.cluster.gpus_per_node else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"cluster.gpus_per_node is {config.cluster.gpus_per_node}, but this machine shows no GPU; run it on one, "
            "or take a recipe with gpus_per_node 0"
        )
    if config.policy.dsv4.rollout_profile == "auto":
        dsv4 = config.policy.dsv4.model_copy(update={"rollout_profile": profile_of_device().name})
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"dsv4": dsv4})})
    return config, device


def _digest(state: Mapping[str, Any]) -> str:
    """16 hex digits over names, dtypes, shapes and bytes of a checkpoint's tensors."""
    from nemo_rl_dsv4.refit.report import StreamTally

    tally = StreamTally()
    for _ in tally.watch(state.items()):
        pass
    return tally.report().checksum


FIX = {
    "profile": "set policy.dsv4.rollout_profile to that",
    "precision": "set policy.precision to that",
    "noise": "give --noise that value",
    "seed": "set grpo.seed, which draws the noise, to that",
    "temperature": "set policy.generation.temperature to that",
    "model": "leave out what changes config.json (policy.hf_config_overrides), or name the checkpoint of the rollout",
    "weights": "name the checkpoint of the rollout with --checkpoint",
}
"""Fact of a rollout -> what to do where a command differs."""


def _facts(options: argparse.Namespace, config: MasterConfig, model: Any, weights: str) -> dict[str, Any]:
    """What a rollout must have been sampled with."""
    written = json.dumps(dict(model.hf_config), sort_keys=True, default=str)
    return {
        "profile": model.profile,
        "precision": model.precision,
        "noise": options.noise,
        "seed": config.grpo.seed,
        "temperature": config.policy.generation.temperature,
        "model": hashlib.sha256(written.encode()).hexdigest()[:16],
        "weights": weights,
    }


def _sampled_before(options: argparse.Namespace, model: Any, facts: Mapping[str, Any]) -> Any:
    """The rollout of `--rollout`, if it was sampled with these weights and settings."""
    from nemo_rl_dsv4.mismatch.rollout_file import load_rollout

    if options.rollout is None:
        return None
    rollout = load_rollout(options.rollout)
    for name, wanted in facts.items():
        if name not in rollout.engine:
            raise UserError(
                f"{options.rollout}: does not say with what {name} it was sampled (an earlier revision wrote it); "
                "sample again"
            )
        if rollout.engine[name] != wanted:
            raise UserError(
                f"{options.rollout}: sampled with {name} {rollout.engine[name]!r}; this command says {wanted!r}; "
                f"{FIX[name]}, or sample again"
            )
    _check_vocabulary(str(options.rollout), int(rollout.tensors["input_ids"].max()), model.hf_config)
    return rollout


@contextmanager
def _engine(
    config: MasterConfig, model: Any, tokenizer: Any, folder: Path, console: Any, *, needed: bool
) -> Iterator[Any]:
    """The recipe's rollout engine with the model's weights; for a rollout on file None instead of a vLLM engine."""
    from nemo_rl_dsv4.cluster import hosts_needed, ray_cluster
    from nemo_rl_dsv4.generation.vllm import VllmGeneration
    from nemo_rl_dsv4.mismatch.engines import VllmRollout
    from nemo_rl_dsv4.mismatch.run import exported, start_engine
    from nemo_rl_dsv4.rollout_engines import start_engines, vllm_spec
    from nemo_rl_dsv4.utils.hosts import reserve
    from nemo_rl_dsv4.utils.progress import progress
    from nemo_rl_dsv4.utils.shared_files import require_here

    if config.policy.generation.backend == "reference":
        yield start_engine(model)
    elif not needed:
        yield None
    else:
        with ray_cluster(config):
            hosts = reserve(hosts_needed(config)).hosts
            require_here(
                hosts,
                "the engine that is studied gets its weights from files of this host",
                "set cluster.num_nodes=1 and unset RAY_ADDRESS, or run this on a host with GPUs",
            )
            generation = start_engines(config, tokenizer, lambda count: None, hosts)
            try:
                assert isinstance(generation, VllmGeneration)
                with progress(console, "starting vLLM"):
                    engine = VllmRollout(generation, vllm_spec(config, folder), exported(model))
                yield engine
            finally:
                generation.shutdown()


def _roll_out(
    options: argparse.Namespace,
    config: MasterConfig,
    model: Any,
    engine: Any,
    tokenizer: Any,
    prompts: Any,
    console: Any,
    facts: Mapping[str, Any],
) -> Any:
    from nemo_rl_dsv4.mismatch.rollout_file import Rollout
    from nemo_rl_dsv4.mismatch.run import roll_out
    from nemo_rl_dsv4.rollout_engines import sampling_params
    from nemo_rl_dsv4.utils.progress import progress

    params = sampling_params(config, tokenizer)
    if options.random_prompts is not None:
        params = replace(params, stop_token_ids=(), stop_strings=())
    with progress(console, "rolling out", options.prompts * options.responses) as advance:
        rollout = roll_out(
            engine,
            model,
            prompts,
            responses=options.responses,
            params=params,
            pad_id=tokenizer.pad_id,
            seed=config.grpo.seed,
            advance=advance,
        )
    rollout = Rollout(rollout.tensors, {**rollout.engine, **facts})
    if options.save_rollout is not None:
        rollout.save(options.save_rollout)
    return rollout


def _checkpoint_of(config: MasterConfig, tokenizer: Any) -> Path:
    """The folder of the recipe's model; a tiny one must have been made by a run."""
    from nemo_rl_dsv4.config.prompts import dataset_section
    from nemo_rl_dsv4.tiny.checkpoint import checkpoint_folder

    if config.policy.model_name != "tiny":
        folder = Path(config.policy.model_name)
        if not folder.is_dir():
            raise UserError(
                f"policy.model_name is {config.policy.model_name!r}, no folder here; name one with --checkpoint"
            )
        return folder
    assert config.policy.dsv4.tiny is not None  # validate() saw to it
    folder = checkpoint_folder(config.policy.dsv4.tiny.model_dump(), dataset_section(config.data.train), tokenizer)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not there: the tiny model of this recipe has not been made yet; run the recipe once "
            "(examples/run_grpo.py), or name a folder with --checkpoint"
        )
    return folder


def _too_far(study: Any, limit: float) -> bool:
    """Whether the aligned trainer is shown to be farther away than allowed, or its distance is no number at all."""
    from nemo_rl_dsv4.mismatch.study import EVERYTHING, NO_ENGINE

    everything = study.variant(EVERYTHING, "reference point")
    if everything is None:
        return False
    floor = 0.0 if study.floor is None else study.floor.k3.high
    distance = everything.mismatch.k3
    if study.floor is not None and study.floor.k3.mean > NO_ENGINE:
        return True
    if not all(math.isfinite(value) for value in (distance.mean, distance.low, distance.high, floor)):
        return True
    return distance.low > max(limit, floor)


def _print(study: Any, files: dict[str, Path]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from nemo_rl_dsv4.mismatch.study import conclusions, rows
    from nemo_rl_dsv4.utils.console import make_console

    console = make_console()
    table = rows(study)
    columns = [Column(name, overflow="fold") for name in table[0]]
    shown = Table(*columns, title="rollout against trainer")
    for row in table:
        shown.add_row(*row.values())
    console.print(shown)
    for sentence in conclusions(study):
        console.print(Text(f"- {sentence}"), soft_wrap=True)
    for name, path in files.items():
        console.print(Text(f"{name}: {path}"), soft_wrap=True)
