"""The unit that datasets produce and environments score."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One question with its answer.

    Attributes:
        prompt: What the user asks, without any chat tokens.
        answer: The right answer as text: what must stand inside ``\\boxed{}``.
        worked: A full solution that ends in ``\\boxed{answer}``, for supervised warm starts; None where no solution is
            known.
        system: The system prompt that goes before, or None.
        metadata: What a scorer or a report needs beside the answer (dataset name, operands, a reasoning-gym entry).
    """

    prompt: str
    answer: str
    worked: str | None = None
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
