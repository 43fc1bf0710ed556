"""What a run shows, on a terminal and in a file."""

import io
import re
import time

import pytest
from rich.console import Console

from nemo_rl_dsv4.utils import progress as progress_module
from nemo_rl_dsv4.utils.console import RunConsole, phase_seconds, print_summary
from nemo_rl_dsv4.utils.progress import progress

METRICS = {
    "train/reward": 0.375,
    "train/gen_kl_error": 1.25e-5,
    "training/rollout_probs_diff_mean": 2e-3,
    "train/approx_entropy": 0.5,
    "train/mean_gen_tokens_per_sample": 15.25,
    "validation/accuracy": 0.4375,
    "timing/train/total_step_time": 4.5,
    "timing/train/generation": 1.5,
    "timing/train/policy_training": 2.5,
    "timing/train/prepare_for_generation/total": 0.25,
    "timing/validation/total_validation_time": 3.0,
}


def console(terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def shown(c: Console) -> str:
    return c.file.getvalue()  # type: ignore[attr-defined]


def test_phases_are_named_shortly_and_sorted_and_the_total_is_none_of_them():
    assert list(phase_seconds(METRICS).items()) == [
        ("validation", 3.0),
        ("training", 2.5),
        ("rollout", 1.5),
        ("refit", 0.25),
    ]


def test_a_step_in_a_file_is_one_line():
    c = console(terminal=False)
    RunConsole(c, 40).on_step(3, METRICS)
    assert shown(c) == (
        "step 3/40 | reward 0.375 | accuracy 0.438 | KL (k3) 1.25e-05 | probs diff 2.00e-03 | entropy 0.500"
        " | tokens 15.2 | 4.5 s (validation 3.0, training 2.5, rollout 1.5, refit 0.2)\n"
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_step_on_a_terminal_fits_its_width_and_loses_no_number(width):
    c = console(terminal=True, width=width)
    RunConsole(c, 40).on_step(3, METRICS)
    assert all(len(line) <= width for line in shown(c).splitlines())
    for text in ("step 3/40  4.5 s", "reward", "0.375", "1.25e-05", "2.00e-03", "15.2", "seconds: validation 3.0"):
        assert text in shown(c)


def test_validation_before_the_first_step_shows_what_there_is():
    c = console(terminal=False)
    RunConsole(c, 40).on_step(0, {"validation/accuracy": 0.25})
    assert shown(c) == "step 0/40 | accuracy 0.250\n"


def test_phases_of_a_step_are_silent_in_a_file_unless_they_are_long(monkeypatch):
    c = console(terminal=False)
    run = RunConsole(c, 40)
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    run.on_phase_start("generation", 128)
    for _ in range(4):
        now[0] += 5.0
        run.on_phase_progress(32)
    run.on_phase_end()
    assert shown(c) == "rollout: 96/128\n"


def test_a_bar_is_gone_when_a_step_is_printed():
    c = console(terminal=True)
    run = RunConsole(c, 40)
    run.on_phase_start("generation", 4)
    run.on_phase_progress(4)
    run.on_step(1, METRICS)
    run.on_phase_start("checkpointing", 0)
    run.on_phase_end()
    assert "step 1/40" in shown(c) and run._display is None


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_job_says_that_it_ended(terminal):
    c = console(terminal=terminal)
    with progress(c, "warm start", 2) as advance:
        advance()
        advance(note="loss 0.5")
    assert "warm start: done in 0.0 s" in shown(c)


def test_a_long_job_that_fails_does_not_claim_to_have_ended():
    c = console(terminal=True)
    with pytest.raises(ZeroDivisionError), progress(c, "warm start", 2):
        raise ZeroDivisionError
    assert "done" not in shown(c)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_summary_names_results_and_files(terminal, tmp_path):
    c = console(terminal=terminal, width=200)
    print_summary(c, {"accuracy [first]": "0.38 -> 0.50"}, {"report": tmp_path / "report.html"})
    assert "accuracy [first]" in shown(c) and "0.38 -> 0.50" in shown(c) and str(tmp_path / "report.html") in shown(c)


@pytest.mark.parametrize("description", ["rollout", "making the tiny model (supervised warm start)"])
def test_a_bar_on_80_columns_shows_its_remaining_time(description):
    """The bar filled the line and rich cut off the estimate behind it."""
    c = console(terminal=True, width=80)
    with progress(c, description, 100) as advance:
        advance(50, "loss 1.234")
        time.sleep(0.3)
    text = shown(c)
    assert re.search(r"50/100 +(--:--|\\d+:\\d\\d)", text), text[-300:]
