"""Several runs beside each other: one row of numbers each, and one picture of all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.console import phase_seconds
from nemo_rl_dsv4.utils.metrics_file import read_steps
from nemo_rl_dsv4.utils.plots import (
    COLORS,
    INK,
    PHASE_COLORS,
    drawable,
    mean,
    on_log_axis,
    running_mean,
    save_png,
    series,
    style_axes,
    with_colors,
)
from nemo_rl_dsv4.utils.run_folder import metrics_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
MISMATCH = {
    "k3": "train/gen_kl_error",
    "k1": "rollout_corr/kl",
    "probs diff": "training/rollout_probs_diff_mean",
}
ENDS = 50
"""Steps of a run's beginning and end whose mismatch is compared; of a shorter run a third."""
SETTLED = 10
"""Steps at the beginning of a run that compile kernels; left out of step times where there are more."""
SMOOTHING = 9
SHOWN_SHARE = 0.01
"""Phases with less than this share of the longest bar are not drawn."""
LEGEND_COLUMNS = 3
MAX_RUNS = len(COLORS)
"""Runs that one picture tells apart."""
PANELS = (
    ("Reward", "train/reward", False),
    ("Validation accuracy", "validation/accuracy", False),
    ("KL between rollout and trainer (k3)", "train/gen_kl_error", True),
    ("Probability difference", "training/rollout_probs_diff_mean", True),
    ("Entropy", "train/approx_entropy", False),
    ("Gradient norm", "train/grad_norm", False),
    ("Response tokens", "train/mean_gen_tokens_per_sample", False),
)


def training_records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl.

    Raises:
        UserError: no such folder, no such file in it, or no training step.
    """
    path = metrics_of(run_dir)
    records = read_steps(path)
    if not any(record.get("train/reward") is not None for record in records):
        raise UserError(f"{path} has no training step (a line with train/reward); name a run that has trained")
    return records


def summarize_run(records: Sequence[Record]) -> dict[str, float]:
    """What a table of runs shows.

    Returns:
        `steps`; of each distance between rollout and trainer the value of step 1, the mean, and `drift`, the mean of
        the last steps over that of the first (`ENDS`); reward of the first and last five steps; first and last
        held-out accuracy; `seconds a step` and the share of it of each phase (medians, without the steps that compile);
        `seconds, steps`, the sum.
    """
    steps = [record for record in records if record.get("train/reward") is not None]
    row: dict[str, float] = {"steps": len(steps)}
    for label, name in MISMATCH.items():
        values = [record[name] for record in steps if record.get(name) is not None]
        if not values:
            continue
        row[f"{label}, step 1"], row[f"{label}, mean"] = values[0], mean(values)
        ends = min(ENDS, len(values) // 3)
        first, last = (mean(values[:ends]), mean(values[-ends:])) if ends else (0.0, 0.0)
        if first != 0 and math.isfinite(last / first):
            row[f"{label}, drift"] = last / first
    rewards = [record["train/reward"] for record in steps]
    row["reward, first 5"], row["reward, last 5"] = mean(rewards[:5]), mean(rewards[-5:])
    accuracies = [record["validation/accuracy"] for record in records if record.get("validation/accuracy") is not None]
    if accuracies:
        row["accuracy, first"], row["accuracy, last"] = accuracies[0], accuracies[-1]
    total, phases = step_seconds(steps)
    if total > 0:
        row["seconds a step"] = total
        row |= {f"share of {name}": seconds / total for name, seconds in phases.items()}
    row["seconds, steps"] = sum(record.get("timing/train/total_step_time") or 0.0 for record in records)
    return row


def step_seconds(steps: Sequence[Record]) -> tuple[float, dict[str, float]]:
    """Median seconds of a step and of its phases, without validation and checkpoints, after the first steps."""
    plain = [record for record in steps if record.get("validation/accuracy") is None]
    plain = plain[SETTLED:] or plain
    totals = [record["timing/train/total_step_time"] for record in plain if record.get("timing/train/total_step_time")]
    names = sorted({name for record in plain for name in phase_seconds(record)})
    phases = {name: statistics.median(phase_seconds(record).get(name, 0.0) for record in plain) for name in names}
    return (statistics.median(totals) if totals else 0.0), {name: value for name, value in phases.items() if value > 0}


def draw_comparison(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """One panel a metric with a line for each run, and seconds by phase.

    Args:
        runs: name -> lines of metrics.jsonl.
        path: the PNG to write.

    Raises:
        UserError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17.0, 7.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    runs = {name: drawable(records) for name, records in runs.items()}
    axes = list(figure.subplots(2, 4).flat)
    for panel, (title, name, log) in zip(axes, PANELS, strict=False):
        _lines(panel, runs, title, name, log=log)
    _bars(axes[-1], runs)
    handles, labels = axes[0].get_legend_handles_labels()
    fitting = int(figure.get_figwidth() * 72 / (6.2 * max(map(len, labels)) + 50))  # points, as the font's size
    columns = max(1, min(len(labels), fitting))
    legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_parse_math(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(figure, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture there ({error.strerror})") from error


def _lines(axes: Axes, runs: Mapping[str, Sequence[Record]], title: str, name: str, *, log: bool) -> None:
    style_axes(axes, title, "step")
    for (run, records), color in zip(runs.items(), COLORS, strict=False):
        label = f" {run}" if run.startswith("_") else run  # matplotlib hides what begins with an underscore
        steps, values = series(records, name)
        if log:
            steps, values = on_log_axis(steps, values)
        if len(values) > 3 * SMOOTHING:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            values = running_mean(values, SMOOTHING)
        axes.plot(steps, values, color=color, linewidth=1.8, label=label, marker="o" if len(values) < 10 else None)
    if log and axes.lines:
        axes.set_yscale("log")


def _bars(axes: Axes, runs: Mapping[str, Sequence[Record]]) -> None:
    """One bar a run, its name above it, and the legend below the bars; phases that no bar would show are left out."""
    style_axes(axes, "Seconds a step by phase (median)", "seconds")
    axes.set_yticks([])
    timed = [
        with_colors(step_seconds([r for r in records if r.get("train/reward") is not None])[1])
        for records in runs.values()
    ]
    longest = max(sum(phases.values()) for phases in timed)
    names = [n for n in PHASE_COLORS if any(p.get(n, 0.0) >= SHOWN_SHARE * longest for p in timed)] if longest else []
    left = [0.0] * len(timed)
    for name in names:
        widths = [phases.get(name, 0.0) for phases in timed]
        axes.barh(range(len(timed)), widths, left=left, color=PHASE_COLORS[name], label=name, height=0.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, run in enumerate(runs):
        look = {"color": INK, "fontsize": 8.5, "va": "bottom", "parse_math": False}
        axes.text(0.01, row - 0.3, run, transform=axes.get_yaxis_transform(), **look)
    if names:
        below = 0.05 + 0.07 * -(-len(names) // LEGEND_COLUMNS)  # share of the height that the legend takes
        axes.set_ylim((len(timed) - 0.7) + len(timed) * below / (1.0 - below), -0.7)
        axes.set_xlim(0.0, 1.06 * max(left))
        axes.legend(fontsize=7.5, frameon=False, ncols=LEGEND_COLUMNS, loc="lower center", columnspacing=1.2)
