"""A rollout on disk: what an engine sampled, its logprobs and routes, so that a trainer can score it elsewhere.

One safetensors file. Tensors: `input_ids` int64 [N, S] (prompt, response directly behind it, padding), `prompt_lengths`
and `lengths` int64 [N], `logprobs` float32 [N, S] (0 outside the response), `prompt` int64 [N] (which sequences share
one), optionally `prefill_logprobs` float32 [N, S] (the engine's own prefill of the same tokens) and `routed_experts`
int16 [N, S, L, K] (-1 = missing). Metadata: what the engine was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_dsv4.errors import UserError

FORMAT = "nemo-rl-dsv4 rollout 1"
REQUIRED = {
    "input_ids": (torch.int64, 2),
    "prompt_lengths": (torch.int64, 1),
    "lengths": (torch.int64, 1),
    "logprobs": (torch.float32, 2),
    "prompt": (torch.int64, 1),
}
MAX_LOGPROB = 1e-4
"""A logprob above 0 by no more than this is rounding of the engine's log-softmax."""
OPTIONAL = {"prefill_logprobs": (torch.float32, 2), "routed_experts": (torch.int16, 4)}


@dataclass(frozen=True)
class Rollout:
    """Sequences of one engine at one set of weights; the tensors are those of the file format."""

    tensors: Mapping[str, Tensor]
    engine: Mapping[str, Any] = field(default_factory=dict)
    """What sampled it: engine and version, profile, precision, temperature, checkpoint."""

    def __post_init__(self) -> None:
        for name, (dtype, dims) in REQUIRED.items():
            if name not in self.tensors:
                raise UserError(f"rollout: tensor {name!r} is missing; wanted {sorted(REQUIRED)}")
            self._check(name, dtype, dims)
        for name, (dtype, dims) in OPTIONAL.items():
            if name in self.tensors:
                self._check(name, dtype, dims)
        unknown = sorted(set(self.tensors) - set(REQUIRED) - set(OPTIONAL))
        if unknown:
            raise UserError(f"rollout: unknown tensor {unknown[0]!r}; wanted {sorted({*REQUIRED, *OPTIONAL})}")
        rows, width = self.tensors["input_ids"].shape
        for name, tensor in self.tensors.items():
            wanted = (rows, width)[: min(tensor.ndim, 2)]
            if tuple(tensor.shape[:2]) != wanted:
                raise UserError(f"rollout: {name} is {list(tensor.shape)}; input_ids {[rows, width]} wants {wanted}")
        start, end = self.tensors["prompt_lengths"], self.tensors["lengths"]
        wrong = (start < 1) | (end < start) | (end > width)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise UserError(
                f"rollout: sequence {row} has {int(start[row])} prompt tokens of {int(end[row])} in rows of {width}"
            )

        self._check_values()

    def _check_values(self) -> None:
        """Refuse what no engine samples: each would otherwise be scored, or fail far from here."""
        if not bool(self.response_mask.any()):
            raise UserError(f"rollout: {self.tensors['input_ids'].shape[0]} sequences without a response token")
        self._refuse("input_ids", self.tensors["input_ids"] < 0, "a token id of 0 or more")
        for name in ("logprobs", "prefill_logprobs"):
            if name in self.tensors:
                values = self.tensors[name]
                wrong = self.response_mask & ~(values.isfinite() & (values <= MAX_LOGPROB))
                self._refuse(name, wrong, "a finite logprob of at most 0 for each response token")

    def _refuse(self, name: str, wrong_NS: Tensor, wanted: str) -> None:
        if bool(wrong_NS.any()):
            row, column = wrong_NS.nonzero()[0].tolist()
            found = self.tensors[name][row, column].item()
            raise UserError(f"rollout: {name} of sequence {row}, position {column} is {found}; wanted {wanted}")

    def _check(self, name: str, dtype: torch.dtype, dims: int) -> None:
        tensor = self.tensors[name]
        if tensor.dtype != dtype or tensor.ndim != dims:
            raise UserError(f"rollout: {name} is {tensor.dtype} with {tensor.ndim} dims; wanted {dtype} with {dims}")

    @property
    def response_mask(self) -> Tensor:
        """Which tokens were sampled, bool [N, S]."""
        position = torch.arange(self.tensors["input_ids"].shape[1])
        start, end = self.tensors["prompt_lengths"], self.tensors["lengths"]
        return (position >= start[:, None]) & (position < end[:, None])

    def save(self, path: Path) -> None:
        """Write the file; an existing one is replaced as a whole."""
        partial = path.with_name(f".{path.name}.partial")
        metadata = {"format": FORMAT, "engine": json.dumps(dict(self.engine))}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, partial, metadata=metadata)
            partial.replace(path)
        except OSError as error:
            raise UserError(f"{path}: the rollout cannot be written ({error})") from error
        finally:
            partial.unlink(missing_ok=True)


def load_rollout(path: Path) -> Rollout:
    """Read a file that `Rollout.save` wrote.

    Raises:
        UserError: no such file, damaged, not a rollout, or values that no engine samples (NaN or positive logprobs,
            negative token ids, no response token).
    """
    if not path.is_file():
        raise UserError(f"{path}: no such rollout file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a rollout ({error})") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path}: format is {metadata.get('format')!r}; wanted {FORMAT!r}")
    try:
        engine = json.loads(metadata.get("engine", "{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: metadata 'engine' is not JSON ({error}); wanted what `Rollout.save` wrote") from error
    if not isinstance(engine, dict):
        raise UserError(f"{path}: metadata 'engine' is a {type(engine).__name__}; wanted a JSON object")
    try:
        return Rollout(tensors, engine)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
