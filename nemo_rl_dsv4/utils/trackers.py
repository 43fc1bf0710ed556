"""Experiment trackers beside `metrics.jsonl`: TensorBoard, and Weights & Biases or MLflow if asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Something that takes a step's numbers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the numbers of one step."""
        ...

    def close(self) -> None:
        """Writes out what is still in memory."""
        ...


class TensorBoard:
    """TensorBoard scalars, written without torch.

    Args:
        folder: where event files go.
        purge_from: hide what an earlier run of the same folder logged at this step and later.
    """

    def __init__(self, folder: Path, purge_from: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=purge_from, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the numbers of one step."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run_id = f"{run_dir.resolve().parent.name}-{run_dir.name}"
        self._run = wandb.init(
            project=settings["project"],
            name=settings["name"],
            entity=settings["entity"],
            dir=str(run_dir),
            id=run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class Mlflow:
    """MLflow; every start, resumed or not, is a run of its own under the same name."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        if settings["tracking_uri"] is not None:
            mlflow.set_tracking_uri(settings["tracking_uri"])
        mlflow.set_experiment(settings["experiment_name"])
        mlflow.start_run(run_name=settings["run_name"])
        self._mlflow = mlflow

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the numbers of one step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


def make_trackers(run_dir: Path, settings: Mapping[str, Any], purge_from: int | None = None) -> list[Tracker]:
    """The trackers that a recipe's `logger` section turns on.

    Args:
        settings: the section as a mapping: `tensorboard_enabled`, `wandb_enabled`, `wandb`, `mlflow_enabled`, `mlflow`.
        purge_from: first step that a resumed run will log again.
    """
    trackers: list[Tracker] = []
    if settings["tensorboard_enabled"]:
        trackers.append(TensorBoard(run_dir / "tensorboard", purge_from))
    if settings["wandb_enabled"]:
        trackers.append(Wandb(run_dir, settings["wandb"]))
    if settings["mlflow_enabled"]:
        trackers.append(Mlflow(settings["mlflow"]))
    return trackers
