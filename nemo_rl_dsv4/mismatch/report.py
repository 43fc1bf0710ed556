"""A study on disk: `mismatch.json`, `mismatch.png` and `mismatch.html`."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.study import Study, conclusions, rows
from nemo_rl_dsv4.utils.plots import COLORS, INK, save_png, style_axes
from nemo_rl_dsv4.utils.report import STYLE
from nemo_rl_dsv4.utils.run_folder import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND_COLORS = {
    "reference point": INK,
    "on its own": COLORS[0],
    "left out": COLORS[1],
    "replay": COLORS[2],
    "floor": COLORS[5],
}
TITLE = "Rollout against trainer"


def write_study(study: Study, folder: Path) -> dict[str, Path]:
    """Write the three files into `folder` (made if needed). Those of an earlier study there go to `earlier-N` in it.

    Returns:
        what was written: short description -> path; `earlier` where another study was there.

    Raises:
        UserError: the folder cannot be written.
    """
    files = {
        name: folder / f"mismatch.{ending}" for name, ending in (("data", "json"), ("plot", "png"), ("report", "html"))
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _set_aside(folder, list(files.values()))
        write_whole(files["data"], json.dumps(study.to_dict(), indent=1) + "\n")
        draw_study(study, files["plot"])
        write_whole(files["report"], render_study(study, files["plot"].read_bytes()))
    except OSError as error:
        raise UserError(f"{folder}: cannot write the study there ({error.strerror})") from error
    return files if earlier is None else {**files, "earlier": earlier}


def _set_aside(folder: Path, files: list[Path]) -> Path | None:
    """Move the files of an earlier study into a folder of their own; None where there is none."""
    there = [path for path in files if path.exists()]
    if not there:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    target = folder / f"earlier-{number}"
    target.mkdir()
    for path in there:
        path.rename(target / path.name)
    return target


def draw_study(study: Study, path: Path) -> None:
    """Draw k3 of every trainer with its interval and, where they were measured, distances by position and layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 1 + bool(study.positions) + bool(study.layers)
    bars = len(study.variants) + sum(x is not None for x in (study.floor, study.other_sums, study.replayed_other_sums))
    figure = Figure(figsize=(7.5 + 4.5 * (panels - 1), 2.0 + 0.28 * bars), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    _bars(axes.pop(0), study)
    if study.positions:
        _curve(
            axes.pop(0),
            "k3 along the response",
            "position in the response",
            [row["first"] for row in study.positions],
            [row["k3"] for row in study.positions],
        )
    if study.layers:
        layers = [row["layer"] for row in study.layers]
        _curve(
            panel := axes.pop(0),
            "Hidden states, relative error",
            "layer",
            layers,
            [row["relative_error"] for row in study.layers],
        )
        panel.lines[-1].set_label("against the engine")
        for key, color, label in (
            ("other_sums", COLORS[5], "other sums alone"),
            ("fp8_products", COLORS[2], "against the engine, FP8 products"),
        ):
            if all(key in row for row in study.layers):
                values = [row[key] for row in study.layers]
                panel.plot(layers, values, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
        panel.legend(frameon=False, fontsize=8)
    save_png(figure, path)


def _bars(axes: Axes, study: Study) -> None:
    """One bar a trainer, widest interval and all, on a logarithmic axis; a k3 of exactly 0 has no bar."""
    style_axes(axes, "k3 of rollout against trainer, 95 % interval over prompts", "k3")
    entries: list[tuple[str, str, Any]] = [
        (f"{v.name}" + ("" if v.kind == "reference point" else f" ({v.kind})"), v.kind, v.mismatch.k3)
        for v in study.variants
    ]
    if study.floor is not None:
        entries.append(("engine against its own prefill", "floor", study.floor.k3))
    if study.other_sums is not None:
        entries.append(("trainer against itself, other sums", "floor", study.other_sums.k3))
    if study.replayed_other_sums is not None:
        entries.append(("the same, experts replayed", "floor", study.replayed_other_sums.k3))
    entries.reverse()
    for height, (_, kind, k3) in enumerate(entries):
        if k3.mean <= 0:
            continue
        axes.barh(height, k3.mean, color=KIND_COLORS[kind], height=0.66)
        axes.hlines(height, max(k3.low, k3.mean * 1e-2), k3.high, color=INK, linewidth=1.1)
    axes.set_yticks(range(len(entries)), [name for name, _, _ in entries])
    positive = [k3.mean for _, _, k3 in entries if k3.mean > 0]
    if positive:
        axes.set_xscale("log")
        axes.set_xlim(min(positive) / 3, max(k3.high for _, _, k3 in entries) * 2)


def _curve(axes: Axes, title: str, label: str, x: list[float], y: list[float]) -> None:
    style_axes(axes, title, label)
    axes.plot(x, y, color=COLORS[0], linewidth=1.8, marker="o", markersize=4)
    if all(value > 0 for value in y):
        axes.set_yscale("log")


def render_study(study: Study, picture: bytes) -> str:
    """The HTML page as text; the picture is inside it."""
    table = rows(study)
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in table[0])
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row.values())}</tr>" for row in table)
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in conclusions(study))
    about = json.dumps({"engine": study.engine, "trainer": study.trainer}, indent=1)
    image = base64.b64encode(picture).decode()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>'
        f"</head><body><h1>{TITLE}</h1><ul>{said}</ul>"
        f'<img alt="k3 of every trainer, by position and by layer" src="data:image/png;base64,{image}">'
        f"<h2>Numbers</h2><table><tr>{heads}</tr>{body}</table>"
        f"{_worst(study)}<h2>What was compared</h2><pre>{html.escape(about)}</pre></body></html>\n"
    )


def _worst(study: Study) -> str:
    """The tokens that are farthest apart, as a table; nothing where all agree."""
    if not study.worst:
        return ""
    names = list(study.worst[0])
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{row[name]:.6g}</td>' for name in names)}</tr>" for row in study.worst)
    return f"<h2>Tokens farthest apart (everything aligned)</h2><table><tr>{heads}</tr>{body}</table>"
