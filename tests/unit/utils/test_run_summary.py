"""The summary of a run in several parts."""

import json

from nemo_rl_dsv4.utils.run_summary import summary_lines, whole_run_summary


def test_a_resumed_run_keeps_its_first_accuracy():
    """After --resume, summary.json called the first validation of the resumed part the first of the run, as text."""
    records = [
        {"step": 0, "validation/accuracy": 0.25, "validation/accuracy_stderr": 0.05},
        {"step": 1, "timing/train/total_step_time": 2.0},
        {"step": 2, "timing/train/total_step_time": 3.04, "validation/accuracy": 0.5},
        {"step": 3, "timing/train/total_step_time": None, "validation/accuracy": None},
    ]
    summary = whole_run_summary(records)
    assert summary == {
        "steps": 3,
        "validation accuracy, first": 0.25,
        "validation accuracy, first, standard error": 0.05,
        "validation accuracy, first, step": 0,
        "validation accuracy, last": 0.5,
        "validation accuracy, last, standard error": 0.0,
        "validation accuracy, last, step": 2,
        "seconds, all steps": 5.0,
    }
    assert all(isinstance(value, (int, float)) for value in json.loads(json.dumps(summary)).values())
    assert summary_lines(summary)["validation accuracy, first"] == "0.250 +- 0.050 (step 0)"


def test_a_run_without_steps_has_a_summary():
    assert whole_run_summary([]) == {"steps": 0, "seconds, all steps": 0}
