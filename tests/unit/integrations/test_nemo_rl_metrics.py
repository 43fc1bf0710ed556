"""NeMo-RL's several calls a step become one record of metrics.jsonl under the names of the embedded trainer."""

import numpy as np
import pytest
import torch

from nemo_rl_dsv4.integrations.nemo_rl.metrics import NO_TRACKERS, MetricsFile, as_number, metric_name
from nemo_rl_dsv4.utils.metrics_file import read_steps
from nemo_rl_dsv4.utils.run_logger import RunLogger


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2.0]), 2.0),
        (torch.tensor(3), 3.0),
        (torch.ones(2), None),
        (np.ones(2), None),
        ({"a": 1}, None),
        ([1.0], None),
        ("text", None),
        (True, None),
        (None, None),
    ],
)
def test_only_single_numbers_are_kept(value, number):
    assert as_number(value) == number


def test_verls_names_have_no_prefix():
    assert metric_name("train", "loss") == "train/loss"
    assert metric_name("train", "rollout_corr/kl") == "rollout_corr/kl"
    assert metric_name("", "loss") == metric_name(None, "loss") == "loss"


def test_a_step_is_one_record(tmp_path):
    run = RunLogger(tmp_path, "policy: {}\n", NO_TRACKERS)
    file = MetricsFile(run)
    file.log_metrics({"accuracy": 0.25}, 0, prefix="validation")
    file.log_metrics({"mean_gen_tokens_per_sample": 9.0}, 1, prefix="train")
    file.log_metrics({"loss": np.float64(0.5), "table": {}, "rollout_corr/kl": 0.01}, 1, prefix="train")
    file.log_metrics({"gpu": 1.0}, 900, prefix="ray", step_metric="ray/ray_step")  # another counter than steps
    file.log_metrics({"total_step_time": 2.0}, 1, prefix="timing/train", step_finished=True)
    file.log_metrics({"loss": 0.4}, 2, prefix="train")
    file.finish()
    file.finish()
    assert read_steps(run.metrics_path) == [
        {"step": 0, "validation/accuracy": 0.25},
        {
            "step": 1,
            "train/mean_gen_tokens_per_sample": 9.0,
            "train/loss": 0.5,
            "rollout_corr/kl": 0.01,
            "timing/train/total_step_time": 2.0,
        },
        {"step": 2, "train/loss": 0.4},
    ]
    assert not (run.run_dir / "tensorboard").exists()
