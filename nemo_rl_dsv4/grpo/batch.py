"""From prompts to rollouts to the training batch.

Shapes: B sequences, P prompt length, S sequence length (prompt + response, right-padded), L layers, K experts a token.
Everything is right-padded: DeepSeek-V4's compressor windows would shift under left padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.reductions import combined_mask
from nemo_rl_dsv4.routes import MISSING_EXPERT

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rollouts:
    """Responses with their prompts; row i of every tensor belongs to problems[i]."""

    prompt_ids: Tensor
    """int64 [B, P]"""
    prompt_lengths: Tensor
    """int64 [B]"""
    output_ids: Tensor
    """Prompt, then response, then padding: int64 [B, S]"""
    response_lengths: Tensor
    """int64 [B]"""
    logprobs: Tensor
    """Log-probability of each response token at sampling, 0 elsewhere: float32 [B, S]"""
    truncated: Tensor
    """True where the length limit ended the response: bool [B]"""
    rewards: Tensor
    """After scaling and shaping: float32 [B]"""
    raw_rewards: Tensor
    """As the environment gave them: float32 [B]"""
    problems: tuple[Any, ...]
    routed_experts: Tensor | None = None
    """Experts the rollout chose, -1 where not recorded: integer [B, S, L, K]"""

    def __len__(self) -> int:
        return len(self.problems)

    def select(self, rows: Sequence[int]) -> "Rollouts":
        """The given rows, in the given order."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        changed: dict[str, Any] = {"problems": tuple(self.problems[row] for row in rows)}
        for name, tensor in self._tensors().items():
            changed[name] = tensor[index]
        return replace(self, **changed)

    def with_rewards(self, rewards: Tensor, *, raw: Tensor | None = None) -> "Rollouts":
        """The same responses with other rewards, and other raw rewards if given."""
        return replace(self, rewards=rewards, raw_rewards=self.raw_rewards if raw is None else raw)

    def _tensors(self) -> dict[str, Tensor]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def pad_prompts(token_ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-pad to the longest: input_ids int64 [B, P] and input_lengths int64 [B].

    Raises:
        ValueError: a prompt is empty.
    """
    lengths = torch.tensor([len(ids) for ids in token_ids], dtype=torch.int64)
    if len(token_ids) == 0 or int(lengths.min()) == 0:
        raise ValueError(f"pad_prompts: every prompt needs at least one token, lengths are {lengths.tolist()}")
    padded = torch.full((len(token_ids), int(lengths.max())), pad_id, dtype=torch.int64)
    for row, ids in enumerate(token_ids):
        padded[row, : len(ids)] = torch.tensor(list(ids), dtype=torch.int64)
    return padded, lengths


def repeat_each(items: Sequence[Any], times: int) -> list[Any]:
    """[a, b] -> [a, a, b, b]: the responses to one prompt stay next to each other."""
    return [item for item in items for _ in range(times)]


def concatenate(parts: Sequence[Rollouts], pad_id: int) -> Rollouts:
    """Stack rollouts of different lengths, right-padding prompts and outputs to the longest.

    Raises:
        ValueError: some parts have routed experts and some do not.
    """
    if len({part.routed_experts is None for part in parts}) > 1:
        raise ValueError("concatenate: routed experts are recorded for some rollouts and missing for others")
    fills = {"prompt_ids": pad_id, "output_ids": pad_id, "logprobs": 0.0, "routed_experts": MISSING_EXPERT}
    joined: dict[str, Any] = {"problems": tuple(problem for part in parts for problem in part.problems)}
    for name in parts[0]._tensors():
        tensors = [getattr(part, name) for part in parts]
        if name in fills:
            width = max(tensor.shape[1] for tensor in tensors)
            tensors = [resize_sequence(tensor, width, fills[name]) for tensor in tensors]
        joined[name] = torch.cat(tensors)
    return replace(parts[0], **joined)


def resize_sequence(values: Tensor, length: int, fill: float | int) -> Tensor:
    """Cut or right-pad dim 1 to `length`: [B, S, ...] -> [B, length, ...]."""
    present = values[:, :length]
    if present.shape[1] == length:
        return present
    tail = (values.shape[0], length - present.shape[1], *values.shape[2:])
    return torch.cat([present, values.new_full(tail, fill)], dim=1)


def response_mask(prompt_lengths_B: Tensor, response_lengths_B: Tensor, length: int) -> Tensor:
    """1 on response tokens, 0 on prompt and padding: int64 [B, length]."""
    position = torch.arange(length).unsqueeze(0)
    start = prompt_lengths_B.unsqueeze(-1)
    return ((position >= start) & (position < start + response_lengths_B.unsqueeze(-1))).to(torch.int64)


def sample_mask(truncated_B: Tensor, *, overlong_filtering: bool) -> Tensor:
    """1 for samples that enter the loss: float32 [B]; truncated ones are 0 with `overlong_filtering`."""
    if overlong_filtering:
        return (~truncated_B).to(torch.float32)
    return torch.ones(truncated_B.shape, dtype=torch.float32)


def padded_length(longest: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `longest`."""
    return -(-longest // multiple) * multiple


def build_train_data(rollouts: Rollouts, *, pad_id: int, divisible_by: int, overlong_filtering: bool) -> Batch:
    """The batch for logprobs and training, before logprobs and advantages are known.

    Args:
        rollouts: responses of one step.
        pad_id: token id of the padding.
        divisible_by: `policy.make_sequence_length_divisible_by`.
        overlong_filtering: mask truncated samples.

    Returns:
        `input_ids` int64 [B, S], `input_lengths` int64 [B] (prompt + response), `generation_logprobs` float32 [B, S],
        `token_mask` int64 [B, S] (1 on response tokens), `sample_mask` float32 [B], and `routed_experts` [B, S, L, K]
        if the rollout recorded them. S is the longest sequence rounded up to a multiple of `divisible_by`.
    """
    input_lengths = rollouts.prompt_lengths + rollouts.response_lengths
    length = padded_length(int(input_lengths.max()), divisible_by)
    inside = torch.arange(length).unsqueeze(0) < input_lengths.unsqueeze(-1)
    mask = response_mask(rollouts.prompt_lengths, rollouts.response_lengths, length)
    ids = resize_sequence(rollouts.output_ids, length, pad_id)
    logprobs = resize_sequence(rollouts.logprobs.to(torch.float32), length, 0.0)
    data: Batch = {
        "input_ids": torch.where(inside, ids, torch.full_like(ids, pad_id)),
        "input_lengths": input_lengths,
        "generation_logprobs": torch.where(mask > 0, logprobs, torch.zeros_like(logprobs)),
        "token_mask": mask,
        "sample_mask": sample_mask(rollouts.truncated, overlong_filtering=overlong_filtering),
    }
    if rollouts.routed_experts is not None:
        data["routed_experts"] = resize_sequence(rollouts.routed_experts, length, MISSING_EXPERT)
    return data


def count_valid(data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Normalisers of the loss over `data`: (valid sequences, valid tokens), float32 scalars.

    Sum them over all data-parallel ranks of a global batch before passing them to the loss. The first position predicts
    nothing and is not counted.
    """
    tokens = combined_mask(data["token_mask"][:, 1:], data["sample_mask"]).sum()
    return data["sample_mask"].to(torch.float32).sum(), tokens


def slice_rows(data: Mapping[str, Tensor], start: int, stop: int) -> Batch:
    """Rows start..stop-1 of every tensor."""
    return {name: tensor[start:stop] for name, tensor in data.items()}
