"""NeMo-RL's metrics in the run folder's `metrics.jsonl`, so that plots, summary and tools read them as ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl_dsv4.grpo.metrics import VERL_METRICS
from nemo_rl_dsv4.utils.run_logger import RunLogger

NO_TRACKERS = {"tensorboard_enabled": False, "wandb_enabled": False, "mlflow_enabled": False}
"""`RunLogger` settings: NeMo-RL's own logger feeds the trackers."""


def as_number(value: Any) -> float | None:
    """A float of anything that is one number, such as a numpy scalar; None of everything else."""
    if isinstance(value, bool | str | bytes) or value is None:
        return None
    item = getattr(value, "item", None)
    if item is not None:
        if getattr(value, "size", 1) != 1 and not callable(getattr(value, "numel", None)):
            return None
        if callable(getattr(value, "numel", None)) and value.numel() != 1:
            return None
        value = item()
    return float(value) if isinstance(value, int | float) else None


def metric_name(prefix: str | None, name: str) -> str:
    """`prefix/name`; verl's names stand as they are."""
    return name if name in VERL_METRICS or not prefix else f"{prefix}/{name}"


class MetricsFile:
    """A backend of NeMo-RL's logger that writes one record a step through a `RunLogger`.

    NeMo-RL logs a step in several calls; a record is written with the last of them, or when a later step begins.
    """

    def __init__(self, run: RunLogger) -> None:
        self._run = run
        self._step: int | None = None
        self._metrics: dict[str, float] = {}

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Keep the numbers of `metrics`; lists, tables and texts are left out."""
        if step_metric is not None:
            return  # counted by something else than training steps, such as seconds of GPU monitoring
        if self._step is not None and step != self._step:
            self.flush()
        self._step = step
        for name, value in metrics.items():
            number = as_number(value)
            if number is not None:
                self._metrics[metric_name(prefix, name)] = number
        if step_finished:
            self.flush()

    def flush(self) -> None:
        """Write what is kept of a step."""
        if self._step is not None and self._metrics:
            self._run.log_step(self._step, self._metrics)
        self._step, self._metrics = None, {}

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Nothing: `config.yaml` has them."""

    def log_histogram(self, histogram: Any, step: int, name: str) -> None:
        """Nothing: not a number."""

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Nothing: the run folder has plots of its own."""

    def finish(self) -> None:
        """Write what is kept."""
        self.flush()
