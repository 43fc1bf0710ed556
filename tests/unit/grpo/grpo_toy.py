"""A whole GRPO world that runs in milliseconds: a small network learns from rewards to repeat a number and stop."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.batch import count_valid, slice_rows
from nemo_rl_dsv4.grpo.metrics import collect_micro_batches, scale_for_updates

NUMBERS, EOS, PAD = 5, 5, 6
VOCABULARY = 7
NEW_TOKENS = 2


class ToyModel(nn.Module):
    """Next-token logits from the last three tokens (-1 before the start): [B, S] -> [B, S, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, 16)
        self.net = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))

    def forward(self, ids_BS: Tensor) -> Tensor:
        padded = nn.functional.pad(ids_BS, (2, 0), value=VOCABULARY)
        window = torch.stack([padded[:, 2:], padded[:, 1:-1], padded[:, :-2]], dim=-1)
        return self.net(self.embed(window).flatten(2))


def next_logprobs(model: ToyModel, ids_BS: Tensor) -> Tensor:
    """Log-probability of token i + 1 at position i: [B, S - 1]."""
    logprobs = model(ids_BS)[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids_BS[:, 1:, None]).squeeze(-1)


class Adam:
    """Adam in a few lines: importing torch's optimizers takes longer than all of these tests."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self.parameters, self.lr, self.steps = parameters, lr, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 0.1)
            second.lerp_(parameter.grad.square(), 0.001)
            direction = (first / (1 - 0.9**self.steps)) / ((second / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            parameter -= self.lr * direction
            parameter.grad = None


class ToyPolicy:
    """Trains the model in global batches and micro-batches of two sizes that do not divide each other."""

    def __init__(self, seed: int = 0, lr: float = 1e-2, global_batch: int = 64, micro_batch: int = 24) -> None:
        torch.manual_seed(seed)
        self.model = ToyModel()
        self.reference = copy.deepcopy(self.model)
        self.optimizer = Adam(list(self.model.parameters()), lr)
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.interrupt_save: BaseException | None = None
        self.exports = 0

    @torch.no_grad()
    def get_logprobs(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logprobs": nn.functional.pad(next_logprobs(self.model, data["input_ids"]), (1, 0))}

    @torch.no_grad()
    def get_reference_policy_logprobs(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"reference_logprobs": nn.functional.pad(next_logprobs(self.reference, data["input_ids"]), (1, 0))}

    def train(self, data: dict[str, Tensor], loss_fn: Any) -> dict[str, Any]:
        rows = len(data["input_ids"])
        updates = rows // self.global_batch
        metrics, norms = [], []
        for first in range(0, rows, self.global_batch):
            batch = slice_rows(data, first, first + self.global_batch)
            seqs, tokens = count_valid(batch)
            for start in range(0, self.global_batch, self.micro_batch):
                part = slice_rows(batch, start, start + self.micro_batch)
                logprobs = next_logprobs(self.model, part["input_ids"])
                loss, values = loss_fn(logprobs, part, global_valid_seqs=seqs, global_valid_tokens=tokens)
                loss.backward()
                metrics.append(scale_for_updates(values, updates))
            norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            self.optimizer.step()
        return {
            "loss": sum(part["loss"] for part in metrics),
            "grad_norm": torch.stack(norms),
            "lr": self.optimizer.lr,
            "all_mb_metrics": collect_micro_batches(metrics),
        }

    def export_to(self, generation: "ToyGeneration") -> dict[str, float]:
        generation.load(self.model)
        self.exports += 1
        return {"tensors": float(len(self.model.state_dict()))}

    def prepare_for_training(self) -> None:
        self.model.train()

    def finish_training(self) -> None:
        self.model.eval()

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.model.state_dict(), folder / "model.pt")
        if self.interrupt_save is not None:
            raise self.interrupt_save
        torch.save((self.optimizer.steps, self.optimizer.moments), folder / "optimizer.pt")
        (folder / ".metadata").touch()

    def load_checkpoint(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        self.optimizer.steps, self.optimizer.moments = torch.load(folder / "optimizer.pt", weights_only=True)


class ToyGeneration:
    """Samples with a copy of the weights; `dtype` bfloat16 makes a rollout that rounds where training does not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.model: ToyModel | None = None
        self.calls: list[dict[str, Any]] = []

    def load(self, model: ToyModel) -> None:
        self.model = copy.deepcopy(model).to(self.dtype)

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...

    @torch.no_grad()
    def generate(self, data: dict[str, Tensor], *, greedy: bool, seed: int, **sampling: Any) -> dict[str, Tensor]:
        if self.model is None:
            raise UserError("no weights yet")
        self.calls.append({"seed": seed, "rows": len(data["input_ids"]), **sampling})
        generator = torch.Generator().manual_seed(seed)
        lengths = data["input_lengths"]
        assert (lengths == data["input_ids"].shape[1]).all(), "the toy's prompts have one length"
        ids = data["input_ids"]
        logprobs = torch.zeros(ids.shape)
        for _ in range(NEW_TOKENS):
            distribution = self.model(ids)[:, -1].float().log_softmax(-1)
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
            logprobs = torch.cat([logprobs, distribution.gather(-1, token)], dim=1)
        first = lengths[0]
        stopped_at_once = ids[:, first] == EOS
        response = torch.where(stopped_at_once, 1, 2)
        return {
            "output_ids": torch.cat([ids, torch.full((len(ids), 1), PAD)], dim=1),
            "logprobs": torch.cat([logprobs, torch.zeros(len(ids), 1)], dim=1),
            "generation_lengths": response,
            "unpadded_sequence_lengths": lengths + response,
            "truncated": ~stopped_at_once & (ids[:, -1] != EOS),
        }


@dataclass(frozen=True)
class ToyPrompt:
    token_ids: tuple[int, int]
    problem: int


ALL_PROMPTS = [ToyPrompt((a, b), a) for a in range(NUMBERS) for b in range(NUMBERS)]
"""Pairs of numbers; the answer is the first one alone."""


class ToyLoader:
    """Shuffled passes over the 25 pairs."""

    def __init__(self, batch: int, seed: int = 0) -> None:
        self.batch, self.seed, self.epoch, self.position = batch, seed, 0, 0

    def next_batch(self) -> list[ToyPrompt]:
        order = list(ALL_PROMPTS)
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        chosen = order[self.position : self.position + self.batch]
        self.position += self.batch
        if self.position + self.batch > len(order):
            self.epoch, self.position = self.epoch + 1, 0
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class ToyTokenizer:
    pad_id = PAD

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(i) for i in ids if i < NUMBERS or not skip_special_tokens)


class ToyEnvironment:
    """1 if the response is exactly the answer."""

    def score(self, problems: Any, responses: Any) -> list[float]:
        return [float(text == str(answer)) for answer, text in zip(problems, responses, strict=True)]


class Recorder:
    """A logger and a console in one, that keep what they are told."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.events: list[tuple[str, Any]] = []

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        assert step not in self.steps, "one set of metrics a step"
        self.steps[step] = dict(metrics)

    def on_phase_start(self, name: str, total: int) -> None:
        self.events.append(("start", (name, total)))

    def on_phase_progress(self, n: int) -> None:
        self.events.append(("progress", n))

    def on_phase_end(self) -> None:
        self.events.append(("end", None))

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("step", step))
