"""The rule of DAPO's math sets: what a last line ``Answer: ...`` says is compared with the answer as text.

Their prompts ask for that line instead of a box. As in NeMo-RL's ``dapo_math_verify``, the line is looked for in the
last 300 characters of a response, its case does not count, and only notation is forgiven: dollar signs, a box or text
command around the answer, spaces, separators of thousands, a unit such as ``degrees``, a left side ``x =``.
"""

from __future__ import annotations

import re

LOOKED_AT = 300
"""Characters at the end of a response in which the line must stand."""

_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\[,;!: ]|\\left\b|\\right\b|\^\{?\\circ\}?|\\%|[\s\"$]|\{,\}")
_UNITS = re.compile(
    r"(?<=[0-9}])(?:degrees?|dollars?|cents?|units?|points?|meters?|feet|inches|km|cm|mph|hours?|minutes?|ways?)\.?$"
)


def answer_line(response: str) -> str | None:
    """What the last ``Answer:`` near the end of a response is followed by on its line; None where there is none."""
    found = _LINE.findall(response[-LOOKED_AT:])
    return found[-1].strip() if found else None


def plain(answer: str) -> str:
    """An answer without the notation that the rule forgives."""
    text = answer
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    text = text.rsplit("=", 1)[-1]
    text = _UNITS.sub("", _NOISE.sub("", text.replace(".$", "$")))
    digits = text.replace(",", "")
    return digits if digits.lstrip("+-").isdecimal() else text


def score_answer_line(gold: str, response: str) -> float:
    """1.0 if the answer line says `gold`, else 0.0."""
    found = answer_line(response)
    if found is None:
        return 0.0
    left, right = plain(found), plain(gold)
    if left.lstrip("+-").isdecimal() and right.lstrip("+-").isdecimal():
        return float(len(left) < 100 and int(left) == int(right))
    return float(left == right and left != "")
