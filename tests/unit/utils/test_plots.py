"""Pictures and the report."""

import base64
import json
import math
import os
import re
import statistics
import sys

import pytest
from matplotlib.image import imread

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils import plots
from nemo_rl_dsv4.utils.metrics_file import append_step, keep_steps_up_to, read_steps
from nemo_rl_dsv4.utils.plots import mean, running_mean, series, values_with_error
from nemo_rl_dsv4.utils.report import plot_run, table


def write_run(folder, steps=12):
    folder.mkdir(exist_ok=True)
    for step in range(steps):
        metrics = {
            "train/reward": 0.3 + 0.01 * step,
            "train/reward_stderr": 0.02,
            "train/loss": -0.01 * step,
            "train/grad_norm": 0.5,
            "train/gen_kl_error": 10.0 ** -(5 + step % 3),
            "training/rollout_probs_diff_mean": 1e-3,
            "train/approx_entropy": 0.5,
            "timing/train/total_step_time": 4.0,
            "timing/train/generation": 1.5,
        }
        if step % 5 == 0:
            metrics["validation/accuracy"] = 0.4
            metrics["validation/accuracy_stderr"] = 0.05
        append_step(folder / "metrics.jsonl", step, metrics)
    (folder / "config.yaml").write_text("policy: {model_name: <b>tiny</b>}\n")


def test_series_leaves_out_steps_without_a_number():
    records = [{"step": 0, "a": 1.0}, {"step": 1}, {"step": 2, "a": None}, {"step": 3, "a": 0.0}]
    assert series(records, "a") == ([0, 3], [1.0, 0.0])


def test_running_mean_starts_with_what_there_is():
    assert running_mean([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]


def test_a_run_gets_a_picture_and_a_report_that_needs_no_other_file(tmp_path):
    write_run(tmp_path)
    files = plot_run(tmp_path)
    picture = imread(files["plots"])
    assert picture.shape[0] > 500 and picture.shape[1] > 1000
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, picture.shape[2]).tolist()}) > 20
    page = files["report"].read_text()
    image = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert image is not None and base64.b64decode(image[1]) == files["plots"].read_bytes()
    assert "&lt;b&gt;tiny&lt;/b&gt;" in page and "<b>tiny" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "summary.png"]


@pytest.mark.parametrize(
    "metrics", [{}, {"train/reward": 0.5}, {"train/gen_kl_error": 0.0, "timing/train/generation": 0.0}]
)
def test_a_run_with_few_metrics_still_gets_its_picture(tmp_path, metrics):
    """Zero on a log axis, and stacked bars of height zero, used to be errors or warnings."""
    append_step(tmp_path / "metrics.jsonl", 1, metrics)
    assert plot_run(tmp_path)["plots"].stat().st_size > 10_000


def test_the_table_has_first_last_mean_smallest_and_largest():
    records = [{"step": s, "train/reward": v} for s, v in ((1, 0.5), (2, 0.25), (3, 0.75))]
    assert table(records) == [("Reward", "0.5000", "0.7500", "0.5000", "0.2500", "0.7500")]


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        plot_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no metrics.jsonl"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(UserError, match="no finished step"):
        plot_run(tmp_path)


def test_steps_are_whole_numbers_and_errors_are_drawn(tmp_path, monkeypatch):
    """A run of three steps had ticks at 1.25 and 1.5; loss, gradient norm and standard errors were not drawn."""
    write_run(tmp_path, steps=3)
    records = read_steps(tmp_path / "metrics.jsonl")
    assert values_with_error(records, "validation/accuracy", "validation/accuracy_stderr") == ([0], [0.4], [0.05])
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, path, **_: figures.append(self) or path.touch()
    )
    plots.draw_summary(records, tmp_path / "picture.png", "title")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    assert {"Reward", "Loss", "Gradient norm", "Validation accuracy"} <= panels.keys()
    for title, axes in panels.items():
        assert all(tick == int(tick) for tick in axes.get_xticks()), title
    assert panels["Reward"].collections, "a band of one standard error"
    assert panels["Validation accuracy"].containers, "bars of one standard error"


def test_equal_curves_and_legends_hide_nothing(tmp_path, monkeypatch):
    """Of the two KL curves the second covered the first, and the legend lay on both."""
    write_run(tmp_path)
    records = [{**r, "train/policy_kl_error": r["train/gen_kl_error"]} for r in read_steps(tmp_path / "metrics.jsonl")]
    for shown in (records, records[:3]):
        figures = []
        monkeypatch.setattr(plots, "save_png", lambda figure, path, into=figures: into.append(figure))
        plots.draw_summary(shown, tmp_path / "picture.png", "title")
        (figure,) = figures
        figure.draw_without_rendering()
        panel = figure.axes[2]
        labelled = [line for line in panel.lines if not line.get_label().startswith("_")]
        assert [line.get_label() for line in labelled] == ["rollout || training", "training || rollout"]
        assert [line.get_linestyle() for line in labelled] == ["-", "--"]
        values = [record["train/gen_kl_error"] for record in shown]
        expected = running_mean(values) if shown is records else values
        for line in labelled:
            assert list(line.get_ydata()) == pytest.approx(expected)
        for axes in figure.axes[:-1]:
            if axes.get_legend() is not None:
                extent = axes.get_legend().get_window_extent()
                assert extent.y0 >= axes.bbox.y1 and extent.x1 <= figure.bbox.x1
                assert extent.x0 > axes._left_title.get_window_extent().x1, axes.get_title(loc="left")


def test_phases_keep_their_colors_whichever_is_longest(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save_png", lambda figure, path: figures.append(figure))
    for training in (1.0, 9.0):
        times = {"timing/train/generation": 3.0, "timing/train/policy_training": training, "timing/train/new": 0.5}
        plots.draw_summary([{"step": 1, **times}], tmp_path / "picture.png", "title")
    for figure, order in zip(figures, (["rollout", "training"], ["training", "rollout"]), strict=True):
        bars = figure.axes[-1].containers
        assert [layer.get_label() for layer in bars] == [*order, plots.OTHERS]
        for layer in bars:
            color = bytes(round(255 * c) for c in layer.patches[0].get_facecolor()[:3]).hex()
            assert f"#{color}" == plots.PHASE_COLORS[layer.get_label()]


def test_the_error_of_a_missing_run_names_runs_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"name one such as logs/grpo-dsv4-tiny-qat/exp_001$"):
        plot_run("logs/exp_001")
    for number in range(1, 8):
        run = tmp_path / f"logs/recipe-{number % 2}/exp_{number:03d}"
        run.mkdir(parents=True)
        append_step(run / "metrics.jsonl", 1, {"train/reward": 0.5})
        os.utime(run / "metrics.jsonl", (number, number))
    (tmp_path / "logs/recipe-1/exp_009").mkdir()  # no metrics
    with pytest.raises(UserError) as error:
        plot_run("logs/exp_001")
    newest = ", ".join(f"logs/recipe-{number % 2}/exp_{number:03d}" for number in (7, 6, 5, 4, 3))
    assert str(error.value) == f"logs/exp_001: no such run folder; below logs there are {newest} and 2 more"


def test_a_text_among_the_numbers_is_named_with_its_line(tmp_path):
    """`plot` and `benchmarks/summarize_runs.py` ended in a traceback over arithmetic with text."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": "high"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2: train/reward is 'high'; wanted a number"):
        plot_run(tmp_path)


HUGE = 10**400


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"train/reward": HUGE}, f"train/reward is {'1' + 39 * '0'}...; wanted a finite number or null"),
        ({"timing/train/total_step_time": HUGE}, f"timing/train/total_step_time is {'1' + 39 * '0'}...; wanted a"),
        ({"train/loss": math.inf}, "train/loss is inf; wanted a finite number or null"),
        ({"timing/train/generation": -math.inf}, "timing/train/generation is -inf; wanted a finite number or null"),
        ({"timing/train/generation": -1}, "timing/train/generation is -1; wanted 0 to 1e+09 seconds"),
        ({"timing/train/generation": 1.7e308}, "timing/train/generation is 1.7e+308; wanted 0 to 1e+09 seconds"),
        ({"validation/accuracy_stderr": -0.1}, "validation/accuracy_stderr is -0.1; wanted a standard error, 0 or"),
        ({"step": 1}, "step is 1 after step 1; wanted steps that go up"),
        ({"step": 0}, "step is 0 after step 1; wanted steps that go up"),
        ({"step": -1}, "step is -1; wanted 0 to 2147483647"),
        ({"step": HUGE}, f"step is {'1' + 39 * '0'}...; wanted 0 to 2147483647"),
    ],
)
def test_what_no_run_writes_is_named_with_its_line(tmp_path, values, found):
    """Most ended in a traceback of matplotlib or statistics; steps that repeat were drawn as a line that turns back."""
    lines = [{"step": 1, "train/reward": 0.5}, {"step": 2, "train/reward": 0.5, **values}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError) as error:
        plot_run(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'metrics.jsonl'}: line 2: {found}")


def test_nan_is_the_null_that_a_run_writes(tmp_path):
    """NaN among the seconds ended in a traceback, and resuming such a run did."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "train/reward": 0.5, "timing/train/generation": math.nan if s else 2.0} for s in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [record["timing/train/generation"] for record in read_steps(path)] == [2.0, None, None]
    assert plot_run(tmp_path)["plots"].stat().st_size > 10_000
    assert keep_steps_up_to(path, 1) == 2 and "NaN" not in path.read_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [1.7e308, sys.float_info.max])
def test_the_largest_floats_are_drawn(tmp_path, largest):
    """`arange: cannot compute length`, and the mean in the report was inf."""
    for step in range(12):
        sign = 1.0 if step % 2 else -1.0
        values = {"train/reward": sign * largest, "train/reward_stderr": largest, "train/loss": largest}
        values |= {"train/gen_kl_error": largest if step % 2 else 5e-324, "rollout_corr/kl": -largest}
        append_step(tmp_path / "metrics.jsonl", step, values)
    assert plot_run(tmp_path)["plots"].stat().st_size > 10_000
    rows = {row[0]: row[1:] for row in table(read_steps(tmp_path / "metrics.jsonl"))}
    assert rows["Loss"] == 5 * (format(largest, ".5f"),)
    assert rows["Reward"][2] == "0.0000"


def test_the_mean_of_large_numbers_is_theirs():
    assert mean([1.5e308, 1.7e308]) == pytest.approx(1.6e308)
    assert mean([-1.7e308, -1.7e308]) == -1.7e308
    assert mean([0.1, 0.2, 0.3]) == statistics.fmean([0.1, 0.2, 0.3])


def test_a_recipe_that_is_no_text_is_named(tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read as UTF-8 text .*; restore the recipe or remove"):
        plot_run(tmp_path)
    assert not (tmp_path / "summary.png").exists()


def test_a_folder_whose_name_is_no_formula_is_drawn(tmp_path):
    r"""`$\bad$` in a name was read as one."""
    write_run(tmp_path / r"$\bad$")
    assert plot_run(tmp_path / r"$\bad$")["plots"].stat().st_size > 10_000
