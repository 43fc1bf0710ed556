"""Several runs beside each other."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils import compare
from nemo_rl_dsv4.utils.compare import MAX_RUNS, step_seconds, summarize_run, training_records
from nemo_rl_dsv4.utils.console import PHASE_LABELS
from nemo_rl_dsv4.utils.metrics_file import append_step
from nemo_rl_dsv4.utils.plots import COLORS, OTHERS, PHASE_COLORS, with_colors


def step(number: int, k3: float, **more: float) -> dict[str, float]:
    return {
        "step": number,
        "train/reward": 0.01 * number,
        "train/gen_kl_error": k3,
        "rollout_corr/kl": 0.0,
        "timing/train/total_step_time": 100.0 if number <= 10 else 4.0,
        "timing/train/generation": 3.0,
        "timing/train/prepare_for_generation/total": 0.2,
        "timing/train/background/generation": 50.0,
        **more,
    }


RECORDS = [
    {"step": 0, "validation/accuracy": 0.25},
    *(step(n, 1e-3 if n <= 50 else 3e-3 if n > 100 else 9.0) for n in range(1, 150)),
    step(150, 3e-3, **{"validation/accuracy": 0.5, "timing/train/total_step_time": 900.0}),
]


def test_drift_compares_the_ends_and_step_times_leave_out_what_compiles() -> None:
    row = summarize_run(RECORDS)
    assert row["steps"] == 150
    assert row["k3, step 1"] == 1e-3 and row["k3, drift"] == pytest.approx(3.0)
    assert "k1, drift" not in row  # a mean of 0 has no ratio
    assert row["seconds a step"] == 4.0
    assert row["share of rollout"] == 0.75
    assert (row["accuracy, first"], row["accuracy, last"]) == (0.25, 0.5)
    assert not any("background" in name for name in row)


def test_a_short_run_compares_thirds() -> None:
    row = summarize_run([step(1, 1.0), step(2, 5.0), step(3, 2.0)])
    assert row["k3, drift"] == 2.0 and row["k3, mean"] == pytest.approx(8 / 3)
    assert step_seconds([step(1, 1.0)])[0] == 100.0


def write(folder, records) -> None:
    folder.mkdir(parents=True)
    for record in records:
        values = dict(record)
        append_step(folder / "metrics.jsonl", values.pop("step"), values)


def test_runs_are_drawn_into_one_picture(tmp_path, capsys) -> None:
    for mode in ("bf16", "qat"):
        write(tmp_path / mode / "exp_001", RECORDS[:40])
    runs = [str(tmp_path / mode / "exp_001") for mode in ("bf16", "qat")]
    out = tmp_path / "new" / "both.png"
    assert main(["plot", *runs, "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown["runs"]) == ["bf16/exp_001", "qat/exp_001"] and shown["plots"] == str(out)
    picture = imread(out)
    assert picture.shape[1] > 1500
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, picture.shape[2]).tolist()}) > 20
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert "k3, drift" in capsys.readouterr().out


def test_bad_input(tmp_path, capsys) -> None:
    with pytest.raises(UserError, match="holds no metrics.jsonl"):
        training_records(tmp_path)
    with pytest.raises(UserError, match="no such run folder"):
        training_records(tmp_path / "nowhere")
    append_step(tmp_path / "metrics.jsonl", 0, {"validation/accuracy": 0.5})
    with pytest.raises(UserError, match="has no training step"):
        training_records(tmp_path)
    assert main(["plot", str(tmp_path), "--out", "x.png"]) == 2
    assert "--out x.png is for several runs" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), str(tmp_path)]) == 2


def test_what_would_be_drawn_wrongly_is_refused_before_anything_is_written(tmp_path, capsys) -> None:
    """The same run twice lost a column, a ninth run its line, and --out replaced a metrics.jsonl by a picture."""
    folders = [str(tmp_path / f"exp_{number}") for number in range(MAX_RUNS + 1)]
    for folder in folders:
        write(Path(folder), RECORDS[:3])
    metrics, before = f"{folders[0]}/metrics.jsonl", Path(folders[0], "metrics.jsonl").read_bytes()
    two, png = folders[:2], str(tmp_path / "x.png")
    for words, message in (
        ([folders[0], f"{folders[0]}/", "--out", png], "is the same run as"),
        ([*folders, "--out", png], f"one picture holds at most {MAX_RUNS}"),
        ([*two, "--out", metrics], "wanted a file whose name ends in .png"),
        ([*two, "--out", ""], "wanted a file whose name ends in .png"),
    ):
        assert main(["plot", *words]) == 2
        assert message in capsys.readouterr().err
    assert Path(metrics).read_bytes() == before and not Path(png).exists()


def test_a_phase_has_one_color_in_every_picture_and_no_line_has_it() -> None:
    """Colors followed the order of the bars: blue was refit in one picture, training in another, and a run in both."""
    assert {*PHASE_LABELS.values(), "training_prep", "exposed_generation", OTHERS} == set(PHASE_COLORS)
    assert len({*PHASE_COLORS.values(), *COLORS}) == len(PHASE_COLORS) + len(COLORS)
    assert with_colors({"refit": 1.0, "new": 2.0, "newer": 0.5}) == {"refit": 1.0, OTHERS: 2.5}


def drawn(monkeypatch, tmp_path, runs):
    """The panel of bars, laid out: each drawn phase -> its bars."""
    figures = []
    monkeypatch.setattr(compare, "save_png", lambda figure, path: figures.append(figure))
    compare.draw_comparison(runs, tmp_path / "picture.png")
    (figure,) = figures
    figure.draw_without_rendering()
    panel = figure.axes[-1]
    return figure, panel, {bars.get_label(): bars.patches for bars in panel.containers}


def test_bars_leave_out_what_nobody_can_see(monkeypatch, tmp_path) -> None:
    short = step(1, 1.0, **{"timing/train/policy_training": 6.77, "timing/train/reward_calculation": 0.05})
    long = step(1, 1.0, **{"timing/train/policy_training": 6.7, "timing/train/data_processing": 0.11})
    _, panel, bars = drawn(monkeypatch, tmp_path, {"short": [short], "long": [long]})
    longest = 3.0 + 0.2 + 6.77 + 0.05
    assert list(bars) == ["rollout", "refit", "training", "batching"]  # rewards: 0.5 % of the longest
    assert [text.get_text() for text in panel.get_legend().get_texts()] == list(bars)
    assert [patch.get_width() for patch in bars["training"]] == pytest.approx([6.77, 6.7])
    assert bars["training"][1].get_x() == pytest.approx(3.2)
    for name, patches in bars.items():
        assert {f"#{bytes(round(255 * c) for c in p.get_facecolor()[:3]).hex()}" for p in patches} == {
            PHASE_COLORS[name]
        }
    assert panel.get_xlim()[1] > 1.03 * longest, "the longest bar ends before the edge"


def test_legends_are_inside_the_picture_and_off_the_bars(monkeypatch, tmp_path) -> None:
    """The legend of seconds by phase was cut off at the picture's edge."""
    names = (*PHASE_LABELS, "training_prep", "exposed_generation", "new")
    times = {f"timing/train/{name}": 1.0 for name in names}
    runs = {f"grpo-dsv4-{'long-' * 8}name-{n}/exp_001": [step(1, 1.0, **times)] for n in range(MAX_RUNS)}
    figure, panel, bars = drawn(monkeypatch, tmp_path, runs)
    assert set(bars) == set(PHASE_COLORS)
    legend = panel.get_legend().get_window_extent()
    assert panel.bbox.x0 <= legend.x0 and legend.x1 <= panel.bbox.x1 and panel.bbox.y0 <= legend.y0
    assert legend.y1 <= min(patch.get_window_extent().y0 for patch in bars["rollout"])
    (names_of_runs,) = figure.legends
    extent = names_of_runs.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 and extent.y1 <= figure.bbox.y1


@pytest.mark.parametrize("names", [("_a", "_b"), (r"x$\bad$", r"y$\bad$"), ("[red]", "[/x]")])
def test_any_names_of_folders_can_be_compared(tmp_path, capsys, names) -> None:
    """Each ended in a traceback: names that matplotlib hides or reads as formulas, or that rich reads as markup."""
    for name in names:
        write(tmp_path / name, RECORDS)
    assert main(["plot", *(str(tmp_path / name) for name in names), "--out", str(tmp_path / "c.png")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)


def test_the_largest_floats_are_compared(tmp_path, capsys) -> None:
    """OverflowError of statistics, and a drift of inf, which is no JSON."""
    values = [1e-300, 1e-300, 1e-300, 1.7e308, 1.7e308, 1.7e308]
    for name in "ab":
        write(tmp_path / name, [step(number, k3) for number, k3 in enumerate(values)])
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c.png"), "--json"]
    assert main(["plot", *words]) == 0
    row = json.loads(capsys.readouterr().out)["runs"]["a"]
    assert row["k3, mean"] == pytest.approx(0.85e308) and "k3, drift" not in row
