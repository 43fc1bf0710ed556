"""The metrics of one run, in one folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from nemo_rl_dsv4.utils.metrics_file import append_step, keep_steps_up_to, read_steps
from nemo_rl_dsv4.utils.run_folder import CONFIG_FILE, METRICS_FILE, make_run_folder, write_whole
from nemo_rl_dsv4.utils.trackers import Tracker, make_trackers

DEFAULT_SETTINGS: dict[str, Any] = {"tensorboard_enabled": True, "wandb_enabled": False, "mlflow_enabled": False}


class RunLogger:
    """Writes `<log_dir>/exp_NNN/`: `config.yaml`, `metrics.jsonl`, TensorBoard events, and plots at the end.

    Steps only go up. The folder is made atomically, so runs that start together get different numbers.

    Args:
        log_dir: `logger.log_dir` of the recipe.
        config_yaml: the resolved recipe.
        settings: the recipe's `logger` section as a mapping; null for TensorBoard only.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, log_dir: Path | str, config_yaml: str, settings: Mapping[str, Any] | None = None) -> None:
        self._open(make_run_folder(Path(log_dir)), config_yaml, settings, last_step=None)

    @classmethod
    def resume(
        cls, run_dir: Path | str, config_yaml: str, last_step: int, settings: Mapping[str, Any] | None = None
    ) -> RunLogger:
        """Goes on in an existing run folder after `last_step`, the step of the checkpoint that was loaded.

        Records of later steps, which the resumed run will make again, are removed; the old `config.yaml` is kept as
        `config.before_step_N.yaml` if the recipe changed.
        """
        logger = cls.__new__(cls)
        logger._open(Path(run_dir), config_yaml, settings, last_step)
        return logger

    def _open(self, run_dir: Path, config_yaml: str, settings: Mapping[str, Any] | None, last_step: int | None) -> None:
        self.run_dir = run_dir
        self.metrics_path = run_dir / METRICS_FILE
        self._last_step = last_step
        config_path = run_dir / CONFIG_FILE
        if last_step is not None:
            keep_steps_up_to(self.metrics_path, last_step)
            if config_path.exists() and config_path.read_text(encoding="utf-8") != config_yaml:
                config_path.rename(run_dir / f"config.before_step_{last_step + 1}.yaml")
        write_whole(config_path, config_yaml)
        purge_from = None if last_step is None else last_step + 1
        self._trackers: Sequence[Tracker] = make_trackers(run_dir, settings or DEFAULT_SETTINGS, purge_from)

    def log_step(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Records one step: training and validation numbers together, under NeMo-RL's names.

        Args:
            step: 0 for what is measured before the first update, then the number of the step.
            metrics: name -> number; scalars of torch and numpy are numbers too. NaN and infinities are written as null.

        Raises:
            ValueError: `step` is not above the last one that was logged.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}; steps must go up")
        record = append_step(self.metrics_path, step, metrics)
        self._last_step = step
        finite = {name: value for name, value in record.items() if name != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Path]:
        """Writes `summary.json`, plots and `report.html`, and closes the trackers.

        Returns:
            what was written: short description -> path.
        """
        from nemo_rl_dsv4.utils.report import plot_run

        self.close()
        files = {"configuration": self.run_dir / CONFIG_FILE}
        summary_path = self.run_dir / "summary.json"
        write_whole(summary_path, json.dumps(dict(summary), indent=2, default=str) + "\n")
        files["summary"] = summary_path
        if self.metrics_path.exists() and read_steps(self.metrics_path):
            files["metrics"] = self.metrics_path
            files |= plot_run(self.run_dir)
        return files

    def close(self) -> None:
        """Closes the trackers. What was logged stays."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = ()

    def discard_if_empty(self) -> bool:
        """Removes the run folder if no step was logged, such as after Ctrl-C at the start; returns whether it did."""
        self.close()
        if self._last_step is not None:
            return False
        shutil.rmtree(self.run_dir, ignore_errors=True)
        return True
