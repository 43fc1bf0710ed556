"""The engines whose rollouts are studied, behind one interface: the CPU reference engine and vLLM on a GPU.

Shapes: N sequences of S tokens, padded on the right; L sequences' common length, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_dsv4.generation.completion import Completion
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm import VllmGeneration
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec
from nemo_rl_dsv4.refit.report import Stream
from nemo_rl_dsv4.refit.transport.file import write_folder
from nemo_rl_dsv4.utils.ray_calls import get


class RolloutEngine(Protocol):
    """What a study needs of an engine that holds the model's weights."""

    name: str
    rows: int | None
    """Sequences of one call; None takes any number."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, request_ids: list[int]
    ) -> list[Completion]:
        """Continue prompts, with the experts of every token."""
        ...

    def score(self, ids_NS: Tensor, lengths_N: Tensor) -> Tensor:
        """Log-probabilities float32 [N, S] of given tokens by prefill; 0 at position 0 and in padding."""
        ...

    def hidden_states(self, ids_NL: Tensor) -> list[Tensor]:
        """What each layer hands to the next in one prefill, float32 [N, L, streams, hidden] each."""
        ...


class CpuEngine:
    """The reference engine of this process."""

    name = "CPU reference engine"

    def __init__(self, engine: ReferenceEngine, rows: int) -> None:
        self.engine, self.rows = engine, rows

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, request_ids: list[int]
    ) -> list[Completion]:
        """See `RolloutEngine`."""
        return self.engine.generate([list(p) for p in prompts], params, seed=seed, request_ids=request_ids)

    def score(self, ids_NS: Tensor, lengths_N: Tensor) -> Tensor:
        """See `RolloutEngine`."""
        scores = torch.cat([self.engine.score(part) for part in ids_NS.split(self.rows)])
        return torch.where(torch.arange(ids_NS.shape[1]) < lengths_N[:, None], scores, 0.0)

    def hidden_states(self, ids_NL: Tensor) -> list[Tensor]:
        """See `RolloutEngine`."""
        layers: Any = self.engine.model.model.layers
        with captured(list(layers)) as outputs:
            self.engine.score(ids_NL)
        return outputs


class VllmRollout:
    """A vLLM engine in its own process, with the weights of `stream`.

    Args:
        generation: started; its first engine is used.
        spec: the engine's settings; routed experts are recorded whatever it says.
        stream: exported weights under checkpoint names.
    """

    rows = None

    def __init__(self, generation: VllmGeneration, spec: VllmSpec, stream: Stream) -> None:
        self.description = generation.build(replace(spec, return_routed_experts=True))
        folder = generation.bucket_folder(1)
        write_folder(stream, folder, capacity_bytes=generation.bucket_bytes, version=1)
        generation.update_weights(folder)
        self.name = f"vLLM {self.description['vllm']}"
        self._generation = generation

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, request_ids: list[int]
    ) -> list[Completion]:
        """See `RolloutEngine`."""
        (actor, *_) = self._generation.actors
        return get([actor.generate.remote([list(p) for p in prompts], params, seed, request_ids)])[0]

    def score(self, ids_NS: Tensor, lengths_N: Tensor) -> Tensor:
        """See `RolloutEngine`."""
        sequences = [row[:length].tolist() for row, length in zip(ids_NS, lengths_N.tolist(), strict=True)]
        scores = torch.zeros(ids_NS.shape)
        for row, values in enumerate(self._generation.score(sequences)):
            scores[row, 1 : len(values) + 1] = torch.tensor(values)
        return scores

    def hidden_states(self, ids_NL: Tensor) -> list[Tensor]:
        """See `RolloutEngine`."""
        (actor, *_) = self._generation.actors
        return get([actor.hidden_states.remote(ids_NL.tolist())])[0]


@contextmanager
def captured(layers: Sequence[torch.nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the first tensor that each layer returns, in order of the layers; filled when the block ends."""
    found: list[list[Tensor]] = [[] for _ in layers]
    outputs: list[Tensor] = []

    def keep(number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            found[number].append((output[0] if isinstance(output, tuple) else output).detach().float().cpu())

        return hook

    handles = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
        outputs += [torch.cat(parts) for parts in found]
