"""This package's problems behind NeMo-RL's dataloader: same prompts, same order, same state after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.prompts import dataset_section, make_datasets
from nemo_rl_dsv4.data import Problem, Prompt, PromptLoader, Tokenizer
from nemo_rl_dsv4.data.datasets import NEMO_RL_NAMES, build_dataset
from nemo_rl_dsv4.environments.single_turn import environment_metadata
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.tree import symbol

TASK = "dsv4_math"


class PromptDataset:
    """Prompts as NeMo-RL's `DatumSpec`s; token ids are those of this package's chat encoding."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
        self.prompts, self.tokenizer = prompts, tokenizer

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt = self.prompts[index]
        ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        message = {"role": "user", "content": self.tokenizer.decode(prompt.token_ids), "token_ids": ids}
        return {
            "message_log": [message],
            "length": len(prompt.token_ids),
            "extra_env_info": environment_metadata(prompt.problem),
            "loss_multiplier": 1.0,
            "idx": index,
            "task_name": TASK,
        }


class BatchOrder:
    """Batches of indices in the order of a `PromptLoader`, for a dataloader that keeps its sampler's state.

    Iterating gives what is left of the current epoch; the next iteration starts the next one.
    """

    def __init__(self, loader: PromptLoader) -> None:
        self.loader, self.epoch, self.position = loader, 0, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[int]]:
        while self.position < len(self):
            order = self.loader.order(self.epoch)
            start = self.position * self.loader.batch
            self.position += 1
            yield order[start : start + self.loader.batch]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, and of which prompts."""
        return self.loader.identity() | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that was the last when `state` was taken.

        Raises:
            UserError: the state is of other prompts, or of another batch size, seed or order.
        """
        self.loader.check_identity(dict(state))
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def train_dataloader(loader: PromptLoader, tokenizer: Tokenizer) -> Any:
    """NeMo-RL's kind of dataloader (torchdata's, with its collate function) over the loader's prompts."""
    return symbol("torchdata.stateful_dataloader:StatefulDataLoader")(
        PromptDataset(loader.prompts, tokenizer),
        batch_sampler=BatchOrder(loader),
        collate_fn=symbol("nemo_rl.data.collate_fn:rl_collate_fn"),
        num_workers=0,  # the prompts are in memory
    )


def validation_dataloader(prompts: Sequence[Prompt], tokenizer: Tokenizer, batch_size: int) -> Any:
    """The validation prompts in order, `batch_size` at once."""
    return symbol("torchdata.stateful_dataloader:StatefulDataLoader")(
        PromptDataset(prompts, tokenizer),
        batch_size=batch_size,
        shuffle=False,
        collate_fn=symbol("nemo_rl.data.collate_fn:rl_collate_fn"),
        num_workers=0,
    )


def load_problems(config: MasterConfig) -> tuple[list[Problem], list[Problem] | None]:
    """Training and validation problems: this package's data sets, or NeMo-RL's built-in ones by their names.

    Raises:
        UserError: as `make_datasets`.
    """
    sections = {"train": config.data.train, "validation": config.data.validation}
    if not any(section is not None and section.dataset_name in NEMO_RL_NAMES for section in sections.values()):
        return make_datasets(config)
    loaded: list[list[Problem] | None] = []
    for split, section in sections.items():
        if section is None:
            loaded.append(None)
        elif section.dataset_name in NEMO_RL_NAMES:
            rows = symbol("nemo_rl.data.datasets:load_response_dataset")(dataset_section(section)).dataset
            loaded.append([problem_of_messages(row, section.dataset_name) for row in rows][: section.size])
        else:
            loaded.append(build_dataset(dataset_section(section), split, config.grpo.seed))
    return loaded[0] or [], loaded[1]


def problem_of_messages(row: Mapping[str, Any], dataset: str) -> Problem:
    """A row of a response data set of NeMo-RL: system (optional), user, and the answer as the assistant's words.

    Raises:
        UserError: the row is no such conversation.
    """
    messages = row.get("messages")
    roles = [message.get("role") for message in messages] if isinstance(messages, Sequence) else None
    if roles not in (["user", "assistant"], ["system", "user", "assistant"]):
        raise UserError(
            f"a row of {dataset} has messages by {roles}; wanted one question of the user and one answer of the "
            "assistant"
        )
    *before, question, answer = [str(message["content"]) for message in messages]  # pyright: ignore[reportOptionalIterable]
    return Problem(question, answer, system=before[0] if before else None, metadata={"dataset": dataset})
