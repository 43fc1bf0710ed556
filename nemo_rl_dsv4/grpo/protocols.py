"""What the trainer needs from the parts it drives. Anything with these methods will do; none of them is imported here.

Batches are dicts of CPU tensors under NeMo-RL's names. B sequences, P prompt length, S sequence length, N new tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nemo_rl_dsv4.grpo.loss import ClippedPGLoss


class Policy(Protocol):
    """The model being trained, on however many ranks."""

    def get_logprobs(self, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`logprobs` float32 [B, S]: log-probability of token i at position i, 0 at position 0."""
        ...

    def get_reference_policy_logprobs(self, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`reference_logprobs` float32 [B, S] of the frozen initial policy."""
        ...

    def train(self, data: Mapping[str, Tensor], loss_fn: ClippedPGLoss) -> Mapping[str, Any]:
        """Update the weights on `data`, in global batches of `policy.train_global_batch_size`.

        Returns `loss`, `grad_norm` (float or tensor, one per update), `all_mb_metrics`: name -> list over micro-batches
        and ranks of what the loss returned (see :func:`nemo_rl_dsv4.grpo.metrics.collect_micro_batches`), and `lr`. A
        policy that replays or compares `routed_experts` adds `router`: how far its own choices agree with them
        (:class:`nemo_rl_dsv4.routes.RouterTally`).
        """
        ...

    def export_to(self, generation: Any) -> Mapping[str, float]:
        """Give `generation` the current weights; returns what to log under `refit/`."""
        ...

    def prepare_for_training(self) -> None: ...

    def finish_training(self) -> None: ...

    def save_checkpoint(self, folder: Path) -> Callable[[], Mapping[str, str]] | None:
        """Write weights, optimizer, schedule and random state into `folder`, which does not exist yet.

        May return as soon as the state is copied, with a function that waits until the files are complete and returns
        the SHA-256 of those it knows, by name within `folder`. None: everything is written.
        """
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote. Raises `UserError` naming the file if it is damaged."""
        ...


class Generation(Protocol):
    """The rollout engine."""

    def prepare_for_generation(self) -> None: ...

    def generate(self, data: Mapping[str, Tensor], *, greedy: bool, seed: int, **sampling: Any) -> Mapping[str, Tensor]:
        """Continue right-padded prompts `input_ids` int64 [B, P] with `input_lengths` int64 [B].

        Args:
            greedy: take the likeliest token.
            seed: together with a row's index it fixes that row's draws.
            sampling: `temperature`, `top_p`, `top_k` in place of the recipe's.

        Returns:
            `output_ids` int64 [B, P + N] (prompt, response directly behind it, padding), `generation_lengths` and
            `unpadded_sequence_lengths` int64 [B], `logprobs` float32 [B, P + N] (0 outside the response), `truncated`
            bool [B], and `routed_experts` [B, P + N, L, K] (-1 = not recorded) if the engine records them.
        """
        ...

    def finish_generation(self) -> None: ...


class Prompt(Protocol):
    """One prompt, chat encoding applied."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def problem(self) -> Any: ...


class Loader(Protocol):
    """Training prompts, epoch after epoch."""

    epoch: int
    """Epochs finished so far."""

    def next_batch(self) -> Sequence[Prompt]: ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; `load_state_dict` continues with the batch after it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Environment(Protocol):
    """Scores responses."""

    def score(self, problems: Sequence[Any], responses: Sequence[str]) -> Sequence[float]: ...


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    @property
    def pad_id(self) -> int: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class MetricsLogger(Protocol):
    """Keeps one set of metrics a step."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Progress(Protocol):
    """What a console shows while a run goes on."""

    def on_phase_start(self, name: str, total: int) -> None:
        """A phase of `total` units of work begins (0: unknown)."""
        ...

    def on_phase_progress(self, n: int) -> None:
        """`n` more units are done."""
        ...

    def on_phase_end(self) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over (step 0: the validation before the first)."""
        ...
