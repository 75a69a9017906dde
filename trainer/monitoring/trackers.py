"""Where metrics go beside `metrics.jsonl`, through one interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.monitoring.mlflow import open_mlflow
from trainer.monitoring.train_job_status import open_train_job_status
from trainer.monitoring.wandb import open_wandb
from trainer.storage.base import join_uri, mounted

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

    from trainer.config.job import JobConfig


class Tracker(Protocol):
    """A copy of the metrics. It never ends training: what it cannot write it reports once, as a warning."""

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def open_trackers(job: JobConfig, total_steps: int) -> list[Tracker]:
    """Those of a run. Raises UserError (exit 69) for one whose package is not installed."""
    opened = (open_tensorboard(job.run.run_uri), open_wandb(job), open_mlflow(job), open_train_job_status(total_steps))
    return [tracker for tracker in opened if tracker]


class TensorBoardLog:
    """TensorBoard's event files."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def write(self, step: int, values: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: each event wakes a thread, which costs ten times as much as creating it.
        scalars = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in values.items()]
        self._writer.add_summary(Summary(value=scalars), step)

    def close(self) -> None:
        self._writer.close()


def open_tensorboard(run_uri: str) -> TensorBoardLog | None:
    """None, with a warning, where the folder cannot be written, such as a mount for root only."""
    from torch.utils.tensorboard import FileWriter

    folder = tensorboard_folder(run_uri)
    try:
        return TensorBoardLog(FileWriter(str(folder)))
    except OSError as error:
        print(f"train: warning: no TensorBoard files, {folder} cannot be written: {error.strerror}", flush=True)
        return None


def tensorboard_folder(run_uri: str) -> Path:
    """Folder of TensorBoard files: AIP_TENSORBOARD_LOG_DIR when the service sets it, else the run's own folder."""
    return mounted(os.environ.get("AIP_TENSORBOARD_LOG_DIR") or join_uri(run_uri, "logs"))
