"""Copies of `metrics.jsonl` for TensorBoard, Weights & Biases and MLflow, through one interface; none ends training."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.monitoring.mlflow import open_mlflow
from vlmpipe.trainer.monitoring.train_job_status import open_train_job_status
from vlmpipe.trainer.monitoring.wandb import open_wandb
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.base import join_uri, mounted

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobConfig


class Tracker(Protocol):
    """A copy of the metrics. It never ends training: what it cannot write it reports once, as a warning."""

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def open_trackers(job: JobConfig, total_steps: int) -> list[Tracker]:
    """Open a run's trackers. Raises UserError (exit 69) for a tracker whose package is not installed."""
    opened = (open_tensorboard(job.run.run_uri), open_wandb(job), open_mlflow(job), open_train_job_status(total_steps))
    return [tracker for tracker in opened if tracker]


class TensorBoardLog:
    """TensorBoard's event file. Where nothing mounts the bucket, the file is here, and a copy there every 15 s."""

    def __init__(self, folder: Path, copied_to: str = "") -> None:
        from torch.utils.tensorboard import FileWriter

        self._writer, self._folder = FileWriter(str(folder)), folder
        name = next(folder.iterdir()).name  # made by the writer
        self._copy = BackgroundWriter(open_storage(copied_to), name) if copied_to else None

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: each event wakes a thread, which costs ten times as much as creating it.
        scalars = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in values.items()]
        self._writer.add_summary(Summary(value=scalars), step)
        if self._copy and self._copy.is_due:
            self._writer.flush()
            self._copy.begin(self._content())

    def close(self) -> None:
        self._writer.close()
        if self._copy:
            with _copying():
                self._copy.write(self._content())
            shutil.rmtree(self._folder)

    def _content(self) -> bytes:
        return b"".join(path.read_bytes() for path in self._folder.iterdir())  # of the one file


def open_tensorboard(run_uri: str) -> TensorBoardLog | None:
    """The log in AIP_TENSORBOARD_LOG_DIR, which Vertex AI sets, else in the run's own folder `logs`.

    None, with a warning, where the folder cannot be written, such as a mount for root only.
    """
    uri = os.environ.get("AIP_TENSORBOARD_LOG_DIR") or join_uri(run_uri, "logs")
    path = mounted(uri)
    try:
        return TensorBoardLog(path) if path else TensorBoardLog(Path(tempfile.mkdtemp()), copied_to=uri)
    except OSError as error:
        print_warning(f"no TensorBoard files, {uri} cannot be written: {error.strerror}")
        return None


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        print_warning(f"TensorBoard's file is not copied: {error.found}")
