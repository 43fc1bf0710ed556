"""Make the tiny model's checkpoint: random weights, a supervised warm start, the released file format.

The folder is complete or absent: it appears by one rename. Its name holds a hash of everything that shaped it, so a
changed setting makes a new checkpoint and an unchanged one is made once.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.data.chat import encode_chat, prompt_messages
from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.tokenizer import Tokenizer
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.numerics.alignment import SWITCHES as ALIGNMENT_SWITCHES
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss, demonstration_batch, similar_length_batches

FORMAT_VERSION = 1
"""Raise it when the maker changes what the same settings produce."""

NOT_MODEL_KEYS = ("seed", "cache_dir", "warm_start", "expert_format")


def tiny_hf_config(tiny: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The official-style `config.json` of a tiny model.

    Args:
        tiny: `policy.dsv4.tiny` of a recipe.
        tokenizer: decides the vocabulary and the special ids.
    """
    sizes = {key: value for key, value in tiny.items() if key not in NOT_MODEL_KEYS}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": tokenizer.vocab_size,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        **sizes,
    }


def checkpoint_folder(tiny: Mapping[str, Any], dataset: Mapping[str, Any], tokenizer: Tokenizer) -> Path:
    """Where the checkpoint of these settings is kept; another vocabulary is another checkpoint."""
    shaped_by = {
        "version": FORMAT_VERSION,
        "tiny": {key: value for key, value in tiny.items() if key != "cache_dir"},
        "dataset": dict(dataset),
        "vocabulary": sorted(tokenizer.fast.get_vocab().items()),
    }
    digest = hashlib.sha256(json.dumps(shaped_by, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return Path(tiny["cache_dir"]) / f"dsv4-tiny-{digest}"


def ensure_tiny_checkpoint(
    tiny: Mapping[str, Any],
    dataset: Mapping[str, Any],
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    group: PolicyGroup,
    on_start: Callable[[int], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Path:
    """Return the checkpoint folder of these settings, making it first if it is not there.

    Args:
        tiny: `policy.dsv4.tiny`.
        dataset: `data.train`, for the cache key.
        problems: training problems with worked answers, used in order.
        tokenizer: the tiny tokenizer; saved with the checkpoint.
        group: processes for the warm start; they are free again afterwards.
        on_start: called with the number of steps when making begins.
        on_step: called with step and loss after every step.

    Raises:
        UserError: no problems, a batch size that does not divide over the processes, or a folder that cannot be
            written.
    """
    folder = checkpoint_folder(tiny, dataset, tokenizer)
    if folder.is_dir():
        return folder
    warm = tiny["warm_start"]
    if not problems:
        raise UserError("data.train has no problems to warm up on")
    if warm["batch_size"] % group.world:
        raise UserError(
            f"policy.dsv4.tiny.warm_start.batch_size {warm['batch_size']} does not divide over {group.world} processes"
        )
    hf_config = tiny_hf_config(tiny, tokenizer)
    if on_start is not None:
        on_start(warm["steps"])
    state = warm_start(hf_config, tiny, problems, tokenizer, group, on_step=on_step)
    with tempfile.TemporaryDirectory() as tokenizer_dir:
        tokenizer.save(tokenizer_dir)
        try:
            write_release_checkpoint(
                state, hf_config, folder, tokenizer_dir=Path(tokenizer_dir), expert_format=tiny["expert_format"]
            )
        except UserError:
            if not folder.is_dir():
                raise
    return folder  # another run that started at the same time may have been first: its checkpoint is the same


def warm_start(
    hf_config: Mapping[str, Any],
    tiny: Mapping[str, Any],
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    group: PolicyGroup,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Train random weights on demonstrations and return the state dict under AutoModel's names.

    The learning rate rises over the first tenth of the steps and falls linearly to zero.
    """
    warm = tiny["warm_start"]
    steps, batch_size = warm["steps"], warm["batch_size"]
    rise = max(1, steps // 10)
    spec = PolicySpec(
        checkpoint=None,
        hf_config=hf_config,
        seed=tiny["seed"],
        sizes=ParallelSizes(group.world, replicate=group.world),
        profile="bf16",
        fake_quant={},
        alignment=dict.fromkeys(ALIGNMENT_SWITCHES, False),
        precision="float32",
        backend=CPU_BACKEND,
        device=group.device,
        micro_batch_size=max(1, batch_size // group.world),
        logprob_batch_size=1,
        optimizer={
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": warm["lr"], "weight_decay": warm["weight_decay"], "betas": warm["betas"]},
        },
        scheduler=[
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 1 / rise, "total_iters": rise}},
            {
                "name": "torch.optim.lr_scheduler.LinearLR",
                "kwargs": {"start_factor": 1.0, "end_factor": 0.0, "total_iters": max(1, steps - rise)},
            },
            {"milestones": [rise]},
        ],
        max_grad_norm=warm["max_grad_norm"],
    )
    rng = random.Random(tiny["seed"])
    group.build(spec, global_batch_size=batch_size)

    def encode_prompt(problem: Problem) -> list[int]:
        return tokenizer.encode(encode_chat(prompt_messages(problem.prompt)))

    batches = similar_length_batches(problems, encode_prompt, batch_size)
    for step in range(steps):
        batch = demonstration_batch(
            next(batches),
            encode_prompt,
            tokenizer.encode,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            careless_share=warm["careless_share"],
            rng=rng,
        )
        loss = float(group.train(batch, DemonstrationLoss())["loss"][0])
        if on_step is not None:
            on_step(step, loss)
    return group.full_state_dict()
