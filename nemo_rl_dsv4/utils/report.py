"""`report.html`: the picture, the main numbers and the recipe of a run in one file that needs no other."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.metrics_file import read_steps
from nemo_rl_dsv4.utils.plots import draw_summary, mean, series
from nemo_rl_dsv4.utils.run_folder import CONFIG_FILE, metrics_of, write_whole

Record = dict[str, Any]

ROWS: tuple[tuple[str, str, str], ...] = (
    ("Reward", "train/reward", ".4f"),
    ("Validation accuracy", "validation/accuracy", ".4f"),
    ("KL, k3 (gen_kl_error)", "train/gen_kl_error", ".3e"),
    ("KL, k1 (rollout_corr/kl)", "rollout_corr/kl", "+.3e"),
    ("Probability difference", "training/rollout_probs_diff_mean", ".3e"),
    ("Entropy", "train/approx_entropy", ".4f"),
    ("Loss", "train/loss", ".5f"),
    ("Gradient norm", "train/grad_norm", ".4f"),
    ("Tokens a response", "train/mean_gen_tokens_per_sample", ".2f"),
    ("Seconds a step", "timing/train/total_step_time", ".2f"),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #20262e; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; height: auto; border: 1px solid #dde2e8; border-radius: 6px; }
table { border-collapse: collapse; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid #dde2e8; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f7f9; padding: 1rem; border-radius: 6px; overflow-x: auto; font-size: 12.5px; }
"""


def plot_run(run_dir: Path | str) -> dict[str, Path]:
    """Draws `summary.png` and writes `report.html` into a run folder, from its `metrics.jsonl` and `config.yaml`.

    Returns:
        what was written: short description -> path.

    Raises:
        UserError: no such folder, no metrics in it, or a `config.yaml` that is no text.
    """
    run_dir = Path(run_dir)
    metrics = metrics_of(run_dir)
    records = read_steps(metrics)
    if not records:
        raise UserError(f"{metrics} holds no finished step yet; nothing to plot")
    title = f"{run_dir.resolve().parent.name}/{run_dir.resolve().name}"
    picture, report, recipe = run_dir / "summary.png", run_dir / "report.html", _config_text(run_dir)
    try:
        draw_summary(records, picture, title)
        write_whole(report, render_report(records, picture.read_bytes(), recipe, title))
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write the plots there ({error.strerror})") from error
    return {"plots": picture, "report": report}


def render_report(records: Sequence[Record], picture: bytes, config_text: str, title: str) -> str:
    """The HTML page as text; the picture is inside it."""
    image = base64.b64encode(picture).decode()
    rows = "".join(f"<tr><td>{row[0]}</td>{''.join(f'<td>{c}</td>' for c in row[1:])}</tr>" for row in table(records))
    steps = records[-1]["step"]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{steps} steps</p>"
        f'<img alt="Main metrics and time by step, with error bars" src="data:image/png;base64,{image}">'
        "<h2>Numbers</h2><table><tr><th></th><th>first</th><th>last</th><th>mean</th><th>smallest</th><th>largest</th>"
        f"</tr>{rows}</table><h2>Recipe</h2><pre>{html.escape(config_text)}</pre></body></html>\n"
    )


def table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """First, last, mean, smallest and largest value of each main metric that the run has."""
    rows = []
    for heading, name, form in ROWS:
        _, values = series(records, name)
        if values:
            numbers = (values[0], values[-1], mean(values), min(values), max(values))
            rows.append((heading, *(format(number, form) for number in numbers)))
    return rows


def _config_text(run_dir: Path) -> str:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return "config.yaml is missing in this folder"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); restore the recipe or remove it") from error
