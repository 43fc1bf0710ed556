"""A prompt loader that resumes exactly where it stopped."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_dsv4.data.chat import encode_chat, prompt_messages
from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.tokenizer import Tokenizer
from nemo_rl_dsv4.errors import UserError

OVERLONG = ("error", "filter")


@dataclass(frozen=True)
class Prompt:
    """A problem as the model sees it: its chat-encoded token ids."""

    token_ids: list[int]
    problem: Problem


class PromptLoader:
    """Batches of prompts, epoch after epoch, in an order that depends only on seed and epoch.

    Iterating gives the batches that are left in the current epoch, then starts the next; :meth:`next_batch` never ends.
    A last batch that is not full is left out (training needs equal batches) unless ``keep_partial`` is set (validation
    needs every problem).

    Attributes:
        skipped: how many prompts were longer than ``max_input_tokens`` and left out.
    """

    def __init__(
        self,
        dataset: Sequence[Problem],
        tokenizer: Tokenizer,
        batch: int,
        seed: int,
        shuffle: bool,
        max_input_tokens: int,
        *,
        overlong: str = "error",
        keep_partial: bool = False,
        thinking: bool = False,
        reasoning_effort: str | None = None,
    ):
        """
        Args:
            batch: prompts a batch.
            max_input_tokens: ``data.max_input_seq_length``, chat tokens included.
            overlong: what to do with a longer prompt: ``error``, or ``filter`` (leave it out and count it).

        Raises:
            UserError: a prompt that is too long, no prompt left, or fewer prompts than one batch.
        """
        if overlong not in OVERLONG:
            raise UserError(f"data.overlong_prompts is {overlong!r}; valid: {', '.join(OVERLONG)}")
        if batch < 1:
            raise UserError(f"the loader's batch is {batch}; it must be 1 or more")
        texts = [encode_chat(prompt_messages(p.prompt, p.system), thinking, reasoning_effort) for p in dataset]
        prompts = [Prompt(ids, p) for ids, p in zip(tokenizer.encode_batch(texts), dataset, strict=True)]
        self.prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= max_input_tokens]
        self.skipped = len(prompts) - len(self.prompts)
        if self.skipped and overlong == "error":
            index, longest = max(enumerate(prompts), key=lambda item: len(item[1].token_ids))
            raise UserError(
                f"{self.skipped} of {len(prompts)} prompts are longer than data.max_input_seq_length "
                f"{max_input_tokens} (the longest, "
                f"number {index}, has {len(longest.token_ids)} tokens); raise it, or set data.overlong_prompts: filter"
            )
        if not prompts:
            raise UserError("no prompt: the dataset is empty; choose another dataset or a larger size")
        if not self.prompts:
            raise UserError(
                f"no prompt is left: all {len(prompts)} are longer than data.max_input_seq_length {max_input_tokens}; "
                "raise it"
            )
        if len(self.prompts) < batch and not keep_partial:
            raise UserError(
                f"the dataset has {len(self.prompts)} prompts, fewer than one batch of {batch}; raise its size"
            )
        self.batch, self.seed, self.shuffle, self.keep_partial = batch, seed, shuffle, keep_partial
        self.epoch = 0
        self.position = 0
        self._fingerprint = _fingerprint(self.prompts)

    def __len__(self) -> int:
        """Batches an epoch."""
        full, rest = divmod(len(self.prompts), self.batch)
        return full + (1 if rest and self.keep_partial else 0)

    def __iter__(self) -> Iterator[list[Prompt]]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def next_batch(self) -> list[Prompt]:
        """The next batch; the state already points past it when it is returned."""
        order = self.order(self.epoch)
        start = self.position * self.batch
        chosen = [self.prompts[index] for index in order[start : start + self.batch]]
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return chosen

    def order(self, epoch: int) -> list[int]:
        """Indices of the prompts in the order of an epoch."""
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what it reads, as plain numbers."""
        return {**self.identity(), "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was the last when `state` was taken.

        Raises:
            UserError: the state is damaged, or of other problems or another batch, seed or order.
        """
        if not isinstance(state, dict):
            raise UserError(
                f"the saved loader state is {type(state).__name__}, not a mapping; resume from another checkpoint"
            )
        self.check_identity(state)
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position < len(self):
            raise UserError(
                f"the saved loader state has epoch {epoch!r} and position {position!r}; an epoch has {len(self)} "
                "batches. Resume from another checkpoint"
            )
        self.epoch, self.position = epoch, position

    def check_identity(self, state: dict[str, Any]) -> None:
        """Refuse the state of a loader of other prompts.

        Raises:
            UserError: names the first setting that differs.
        """
        for key, value in self.identity().items():
            if state.get(key) != value:
                raise UserError(
                    f"the saved loader state has {key} {state.get(key)!r}, this run has {value!r}; "
                    "resume with the same data settings"
                )

    def identity(self) -> dict[str, Any]:
        """What the loader reads and in which order, as plain numbers."""
        return {
            "prompts": len(self.prompts),
            "batch": self.batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "keep_partial": self.keep_partial,
            "fingerprint": self._fingerprint,
        }


def _fingerprint(prompts: list[Prompt]) -> str:
    """A hash of all prompts in order: another dataset of the same size has another one."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr(prompt.token_ids).encode())
    return digest.hexdigest()[:16]
