"""Roll out prompts, score the responses, and with dynamic sampling go on until the batch is full of useful groups."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.advantages import prompt_groups
from nemo_rl_dsv4.grpo.batch import Rollouts, concatenate, pad_prompts, repeat_each
from nemo_rl_dsv4.grpo.phases import Phases
from nemo_rl_dsv4.grpo.protocols import Environment, Generation, Loader, Prompt, Tokenizer
from nemo_rl_dsv4.grpo.reductions import standard_error
from nemo_rl_dsv4.grpo.rewards import count_outside_source, groups_with_spread, scale_rewards, shape_rewards
from nemo_rl_dsv4.grpo.settings import GRPOSettings


class StepRollouts(NamedTuple):
    """What a step trains on, and what it took to get it."""

    rollouts: Rollouts
    metrics: dict[str, float]


def sampling_seed(seed: int, purpose: str, step: int, batch: int) -> int:
    """A seed in 0..2^31-1 that depends on nothing but its arguments, so that a resumed run draws the same numbers."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{batch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def gather_rollouts(
    loader: Loader,
    generation: Generation,
    environment: Environment,
    tokenizer: Tokenizer,
    settings: GRPOSettings,
    phases: Phases,
    *,
    step: int,
) -> StepRollouts:
    """The responses of one step: num_prompts_per_step x num_generations_per_prompt rows, groups side by side.

    With `use_dynamic_sampling`, groups whose rewards (before length shaping) are all equal are dropped, and more
    batches are rolled out until enough groups are left; groups beyond that are discarded (DAPO, arXiv 2503.14476).

    Raises:
        UserError: dynamic sampling used up `dynamic_sampling_max_gen_batches`, or the loader's batch does not fit.
    """
    wanted = settings.num_prompts_per_step * settings.num_generations_per_prompt
    kept: list[Rollouts] = []
    seen: list[Tensor] = []
    batches = 0
    outside = 0
    while True:
        prompts = loader.next_batch()
        batches += 1
        seed = sampling_seed(settings.seed, "train", step, batches)
        rollouts = roll_out(
            prompts, settings.num_generations_per_prompt, generation, environment, tokenizer, phases, seed=seed
        )
        with phases.phase("reward_calculation"):
            scaled = scale_rewards(rollouts.raw_rewards, settings.reward_scaling)
            outside += count_outside_source(rollouts.raw_rewards, settings.reward_scaling)
            shaped = shape_rewards(scaled, rollouts.response_lengths, rollouts.truncated, settings.reward_shaping)
            rollouts = rollouts.with_rewards(shaped)
            seen.append(shaped)
            if settings.use_dynamic_sampling:
                useful = groups_with_spread(scaled, prompt_groups(rollouts.prompt_ids))
                rollouts = rollouts.select(useful.nonzero().flatten().tolist())
        kept.append(rollouts)
        rows = sum(len(part) for part in kept)
        if rows >= wanted or not settings.use_dynamic_sampling:
            break
        if batches >= settings.dynamic_sampling_max_gen_batches:
            raise UserError(
                f"dynamic sampling found {rows} of {wanted} responses in groups of differing rewards after "
                f"grpo.dynamic_sampling_max_gen_batches = {batches} batches; the problems are too easy or too hard for "
                "this policy: change them, raise that limit, or raise grpo.num_generations_per_prompt"
            )
    if rows < wanted:
        raise UserError(
            f"the loader gave {rows // settings.num_generations_per_prompt} prompts; "
            f"grpo.num_prompts_per_step is {settings.num_prompts_per_step}"
        )
    joined = concatenate(kept, tokenizer.pad_id)
    rewards = torch.cat(seen)
    metrics = {"reward": rewards.mean().item(), "num_rewards_clamped": float(outside)}
    # Responses to one prompt are not independent: the prompts' means are.
    per_prompt = rewards.to(torch.float64).reshape(-1, settings.num_generations_per_prompt).mean(dim=1)
    metrics["reward_stderr"] = standard_error(per_prompt)
    if settings.use_dynamic_sampling:
        metrics["dynamic_sampling_num_gen_batches"] = float(batches)
        metrics["dynamic_sampling_num_discarded_valid_samples"] = float(rows - wanted)
    chosen = joined.select(range(wanted))
    if settings.use_dynamic_sampling:
        metrics["filtered_reward"] = chosen.rewards.mean().item()
    return StepRollouts(chosen, metrics)


def roll_out(
    prompts: Sequence[Prompt],
    generations: int,
    generation: Generation,
    environment: Environment,
    tokenizer: Tokenizer,
    phases: Phases,
    *,
    seed: int,
) -> Rollouts:
    """Generate `generations` responses to every prompt and score them; `rewards` are still the raw ones."""
    rows = repeat_each(prompts, generations)
    with phases.phase("generation", total=len(rows)):
        generation.prepare_for_generation()
        rollouts = generate_rows(rows, generation, tokenizer.pad_id, seed=seed)
        generation.finish_generation()
    with phases.phase("reward_calculation"):
        return score_rollouts(rollouts, environment, tokenizer)


def generate_rows(
    rows: Sequence[Prompt], generation: Generation, pad_id: int, *, seed: int, **sampling: Any
) -> Rollouts:
    """One response for each row, with rewards of 0.

    Raises:
        ValueError: the engine's output does not fit the request.
        UserError: a response token's logprob is not finite.
    """
    ids, lengths = pad_prompts([row.token_ids for row in rows], pad_id)
    output = generation.generate({"input_ids": ids, "input_lengths": lengths}, greedy=False, seed=seed, **sampling)
    check_generation(output, lengths)
    none = torch.zeros(len(rows))
    return Rollouts(
        prompt_ids=ids,
        prompt_lengths=lengths,
        output_ids=output["output_ids"].to(torch.int64),
        response_lengths=output["generation_lengths"].to(torch.int64),
        logprobs=output["logprobs"].to(torch.float32),
        truncated=output["truncated"].to(torch.bool),
        rewards=none,
        raw_rewards=none,
        problems=tuple(row.problem for row in rows),
        routed_experts=output.get("routed_experts"),
    )


def check_generation(output: Mapping[str, Tensor], prompt_lengths_B: Tensor) -> None:
    """Refuse an engine output that would train on the wrong tokens.

    Raises:
        ValueError: missing tensor, wrong number of rows, inconsistent lengths, routes of other tokens.
        UserError: the logprob of a response token is not finite.
    """
    names = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "truncated")
    missing = [name for name in names if name not in output]
    if missing:
        raise ValueError(f"generation output lacks {missing}; it has {sorted(output)}")
    rows = len(prompt_lengths_B)
    wrong = {name: tuple(output[name].shape) for name in names if output[name].shape[0] != rows}
    if wrong:
        raise ValueError(f"generation output for {rows} prompts has shapes {wrong}")
    total = prompt_lengths_B + output["generation_lengths"]
    bad = (total != output["unpadded_sequence_lengths"]) | (total > output["output_ids"].shape[1])
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"generation output row {row}: prompt {int(prompt_lengths_B[row])} + response "
            f"{int(output['generation_lengths'][row])} tokens, but unpadded_sequence_lengths is "
            f"{int(output['unpadded_sequence_lengths'][row])} of {output['output_ids'].shape[1]} columns"
        )
    routes = output.get("routed_experts")
    if routes is not None and (routes.ndim != 4 or routes.shape[:2] != output["output_ids"].shape):
        raise ValueError(
            f"generation output has routed_experts {tuple(routes.shape)} for output_ids "
            f"{tuple(output['output_ids'].shape)}; wanted [sequences, tokens, layers, experts a token]"
        )
    position = torch.arange(output["logprobs"].shape[1]).unsqueeze(0)
    response = (position >= prompt_lengths_B.unsqueeze(-1)) & (position < total.unsqueeze(-1))
    broken = response & ~torch.isfinite(output["logprobs"])
    if broken.any():
        row, column = broken.nonzero()[0].tolist()
        start, end = int(prompt_lengths_B[row]), int(total[row])
        tail = output["output_ids"][row, max(start, column - 3) : column + 1].tolist()
        value, rows_broken = float(output["logprobs"][row, column]), int(broken.any(dim=1).sum())
        raise UserError(
            f"the rollout engine gave logprob {value} for token {column - start + 1} of {end - start} of row {row} "
            f"(prompt of {start} tokens, last tokens {tail}); {int(broken.sum())} tokens of {rows_broken} rows are "
            "like that, so nothing was trained on this batch. The engine's own numbers overflowed or are of memory "
            "nobody wrote: compare its decoding with its prefill by `nemo-rl-dsv4 mismatch --config RECIPE`, and try "
            "another vLLM or policy.generation.vllm_kwargs"
        )


def response_texts(rollouts: Rollouts, tokenizer: Tokenizer) -> list[str]:
    """The text of every response, special tokens left out."""
    texts = []
    for row in range(len(rollouts)):
        start = int(rollouts.prompt_lengths[row])
        ids = rollouts.output_ids[row, start : start + int(rollouts.response_lengths[row])].tolist()
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def score_rollouts(rollouts: Rollouts, environment: Environment, tokenizer: Tokenizer) -> Rollouts:
    """The same rollouts with `raw_rewards` and `rewards` from the environment.

    Raises:
        ValueError: the environment returned another number of rewards, or one that is not finite.
    """
    rewards = torch.tensor(
        list(environment.score(rollouts.problems, response_texts(rollouts, tokenizer))), dtype=torch.float32
    )
    if rewards.shape != (len(rollouts),) or not torch.isfinite(rewards).all():
        raise ValueError(
            f"the environment returned {rewards.numel()} rewards for {len(rollouts)} responses, or one that is not "
            f"finite: {rewards.tolist()}"
        )
    return rollouts.with_rewards(rewards, raw=rewards)
