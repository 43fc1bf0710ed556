"""The main numbers of a run, over all of its parts: a resumed run is one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VALIDATION = "validation accuracy"


def whole_run_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`steps`, first and last held-out accuracy with their standard errors and steps, and the seconds of all steps.

    Args:
        records: the lines of metrics.jsonl.

    Returns:
        JSON-able; every value is a number.
    """
    summary: dict[str, Any] = {"steps": records[-1]["step"] if records else 0}
    validated = [record for record in records if record.get("validation/accuracy") is not None]
    if validated:
        for label, record in (("first", validated[0]), ("last", validated[-1])):
            summary[f"{VALIDATION}, {label}"] = record["validation/accuracy"]
            summary[f"{VALIDATION}, {label}, standard error"] = record.get("validation/accuracy_stderr") or 0.0
            summary[f"{VALIDATION}, {label}, step"] = record["step"]
    summary["seconds, all steps"] = round(sum(r.get("timing/train/total_step_time") or 0.0 for r in records), 1)
    return summary


def summary_lines(summary: Mapping[str, Any]) -> dict[str, str]:
    """The same for a reader: accuracy and its standard error in one line."""
    lines = {}
    for name, value in summary.items():
        if name.endswith((", standard error", ", step")):
            continue
        error = summary.get(f"{name}, standard error")
        lines[name] = str(value) if error is None else f"{value:.3f} +- {error:.3f} (step {summary[f'{name}, step']})"
    return lines
