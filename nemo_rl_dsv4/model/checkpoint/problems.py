"""What is wrong with a checkpoint, as data, and all of it in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_dsv4.errors import UserError

SHOWN = 20
"""Problems written out in an error message; `nemo-rl-dsv4 inspect` shows all."""


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        file: name of the file in the checkpoint's folder.
        tensor: the tensor, or None where the file itself is meant.
        message: what was found, what was wanted, and the fix; begins with the file's path.
    """

    file: str
    tensor: str | None
    message: str

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields, for JSON."""
        return asdict(self)


def problems_error(directory: Path, problems: Sequence[Problem]) -> UserError:
    """Return one error for all problems: the message itself if there is one, else a numbered list."""
    if len(problems) == 1:
        return UserError(problems[0].message)
    lines = [f"({number}) {problem.message}" for number, problem in enumerate(problems[:SHOWN], start=1)]
    more = len(problems) - len(lines)
    if more > 0:
        lines.append(f"and {more} more, see nemo-rl-dsv4 inspect {directory}")
    return UserError(f"{directory}: {len(problems)} problems:\n" + "\n".join(lines))
