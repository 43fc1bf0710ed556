"""One picture of a run: does it learn, do trainer and rollout agree, where does the time go."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_dsv4.utils.console import phase_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
INK, GRID, RAW = "#20262e", "#dde2e8", 0.3
COLORS = ("#2563a8", "#d9782d", "#3a8f5c", "#8b5fbf", "#c2485a", "#7a8794", "#c9a227", "#3aa6b9")
OTHERS = "others"
PHASE_COLORS = {
    "rollout": "#12355b",
    "refit": "#f2a7b5",
    "training": "#e9d8a6",
    "logprobs": "#7a4a26",
    "validation": "#a7d3ee",
    "checkpoint": "#5a2a4f",
    "rewards": "#c9e4a5",
    "advantages": "#d9b8f0",
    "batching": "#4b5a2a",
    "training_prep": "#f7c59f",
    "exposed_generation": "#0f5257",
    OTHERS: "#c9d0d8",
}
"""The same phase has the same color in every picture, and none of them is a line's; phases without one are `OTHERS`."""
LARGEST_DRAWN = 1e200
"""Larger values are drawn as this one, and on log axes those below its inverse as that; matplotlib's axes overflow."""
SMOOTHING = 5
SHOWN_PHASES = 6


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; steps without it, or where it was not finite, are left out."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def on_log_axis(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The points that a log axis has, none below `1 / LARGEST_DRAWN`."""
    points = [(step, max(value, 1 / LARGEST_DRAWN)) for step, value in zip(steps, values, strict=True) if value > 0]
    return [step for step, _ in points], [value for _, value in points]


def mean(values: Sequence[float]) -> float:
    """Mean of at least one number, also where their sum is beyond the largest float."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        shrunk = [math.ldexp(value, -64) for value in values]
        return math.ldexp(sorted((min(shrunk), statistics.fmean(shrunk), max(shrunk)))[1], 64)


def drawable(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """The same records with every value within `LARGEST_DRAWN`, so that axes and sums of values stay finite."""
    return [
        {name: value if value is None else max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value)) for name, value in r.items()}
        for r in records
    ]


def running_mean(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Mean of each value and up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def with_colors(phases: Mapping[str, float]) -> dict[str, float]:
    """Phase -> seconds, those that have no color of their own added up as `OTHERS`."""
    named: dict[str, float] = {}
    for name, seconds in phases.items():
        shown = name if name in PHASE_COLORS else OTHERS
        named[shown] = named.get(shown, 0.0) + seconds
    return named


def draw_summary(records: Sequence[Record], path: Path, title: str) -> None:
    """Draws nine panels into a PNG; reward and accuracy with one standard error up and down."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = drawable(records)
    figure = Figure(figsize=(13.5, 10.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 3)
    figure.suptitle(title, fontsize=13, color=INK, x=0.01, ha="left", fontweight="bold", parse_math=False)
    _line(axes[0, 0], records, "Reward", [("train/reward", "")], smooth=True)
    _error_band(axes[0, 0], records, "train/reward", "train/reward_stderr")
    _line(axes[0, 1], records, "Validation accuracy", [("validation/accuracy", "")], marker="o")
    _error_bars(axes[0, 1], records, "validation/accuracy", "validation/accuracy_stderr")
    kl = [("train/gen_kl_error", "rollout || training"), ("train/policy_kl_error", "training || rollout")]
    _line(axes[0, 2], records, "KL (k3)", kl, log=True, smooth=True)
    difference = [("training/rollout_probs_diff_mean", "mean"), ("training/rollout_probs_diff_max", "largest")]
    _line(axes[1, 0], records, "Probability difference", difference, log=True)
    _line(axes[1, 1], records, "Entropy", [("train/approx_entropy", "")], smooth=True)
    _line(axes[1, 2], records, "Loss", [("train/loss", "")], smooth=True)
    _line(axes[2, 0], records, "Gradient norm", [("train/grad_norm", "")], smooth=True)
    length = [("train/mean_gen_tokens_per_sample", "mean"), ("train/max_gen_tokens_per_sample", "longest")]
    _line(axes[2, 1], records, "Response tokens", length)
    _phases(axes[2, 2], records)
    save_png(figure, path)


def values_with_error(records: Sequence[Record], name: str, error: str) -> tuple[list[int], list[float], list[float]]:
    """Steps, values and standard errors of one metric, where a step has both."""
    both = [r for r in records if r.get(name) is not None and r.get(error) is not None]
    return [r["step"] for r in both], [r[name] for r in both], [r[error] for r in both]


def _error_band(axes: Axes, records: Sequence[Record], name: str, error: str) -> None:
    steps, values, errors = values_with_error(records, name, error)
    if steps:
        low = [value - half for value, half in zip(values, errors, strict=True)]
        high = [value + half for value, half in zip(values, errors, strict=True)]
        axes.fill_between(steps, low, high, color=COLORS[0], alpha=0.12, linewidth=0)


def _error_bars(axes: Axes, records: Sequence[Record], name: str, error: str) -> None:
    steps, values, errors = values_with_error(records, name, error)
    if steps:
        axes.errorbar(steps, values, yerr=errors, fmt="none", ecolor=COLORS[0], elinewidth=1, capsize=2.5)


def style_axes(axes: Axes, title: str, label: str) -> None:
    """The look that all our pictures share; `label` names the horizontal axis."""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.tick_params(which="both", labelsize=8.5, colors=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def save_png(figure: Figure, path: Path) -> None:
    """Write a picture so that a reader sees the old one or all of the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _over_steps(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, title, "step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _no_data(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged in this run", ha="center", va="center", transform=axes.transAxes, color="#7a8794")
    axes.set_xticks([])
    axes.set_yticks([])


def _line(
    axes: Axes,
    records: Sequence[Record],
    title: str,
    lines: Sequence[tuple[str, str]],
    *,
    log: bool = False,
    smooth: bool = False,
    marker: str | None = None,
) -> None:
    """One or two metrics over steps.

    `smooth` draws a running mean over the raw values; the second is dashed, so that the first shows where both
    are equal.
    """
    _over_steps(axes, title)
    drawn = False
    for (name, label), color, dashes in zip(lines, COLORS, ("-", (0, (3, 1.5))), strict=False):
        steps, values = series(records, name)
        if log:
            steps, values = on_log_axis(steps, values)
        if not steps:
            continue
        drawn = True
        line = dashes if smooth else "-"
        few = marker or ("o" if len(steps) < 3 else None)
        if smooth and len(steps) > SMOOTHING:
            axes.plot(steps, values, color=color, alpha=RAW, linewidth=0.8)
            label = label or f"mean of {SMOOTHING} steps"
            axes.plot(steps, running_mean(values), color=color, linewidth=1.8, linestyle=line, label=label)
        else:
            look = {"linewidth": 1.8, "linestyle": line, "marker": few, "markersize": 4}
            axes.plot(steps, values, color=color, label=label or None, **look)
    if not drawn:
        _no_data(axes)
        return
    if log:
        axes.set_yscale("log")
    if axes.get_legend_handles_labels()[0]:
        beside_title = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        axes.legend(fontsize=8, frameon=False, ncols=2, columnspacing=1.0, handlelength=1.8, **beside_title)


def _phases(axes: Axes, records: Sequence[Record]) -> None:
    """Seconds of each phase, stacked; small phases are added up."""
    _over_steps(axes, "Seconds by phase")
    timed = [(record["step"], with_colors(phase_seconds(record))) for record in records]
    timed = [(step, phases) for step, phases in timed if phases]
    if not timed:
        _no_data(axes)
        return
    totals: dict[str, float] = {}
    for _, phases in timed:
        for name, seconds in phases.items():
            totals[name] = totals.get(name, 0.0) + seconds
    ranked = sorted(totals, key=lambda name: (name == OTHERS, -totals[name]))
    named, others = ranked[:SHOWN_PHASES], ranked[SHOWN_PHASES:]
    steps = [step for step, _ in timed]
    bottom = [0.0] * len(timed)
    layers = [(name, [phases.get(name, 0.0) for _, phases in timed]) for name in named]
    if others:
        layers.append((OTHERS, [sum(phases.get(name, 0.0) for name in others) for _, phases in timed]))
    for name, heights in layers:
        axes.bar(steps, heights, bottom=bottom, width=1.0, color=PHASE_COLORS[name], label=name, linewidth=0)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds", fontsize=9, color=INK)
    axes.set_ylim(0, max(bottom) * 1.35 or 1.0)
    axes.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper left")
