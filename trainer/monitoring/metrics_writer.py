"""Metrics of a run: `metrics.jsonl`, TensorBoard, and the summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.monitoring.hypertune import report_measured
from trainer.storage import open_storage
from trainer.storage.background_writer import BackgroundWriter
from trainer.storage.base import join_uri, mounted
from trainer.storage.records import read_lines, seal, unseal

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

    from trainer.monitoring.wandb import WandbLog

FILE = "metrics.jsonl"
STATES = {"active": 1, "absent": 0}  # words in the log (reduction_server) as numbers


class MetricsLog:
    """One JSON object per logged step. Drops the lines of an earlier attempt after the step resumed from."""

    def __init__(
        self, run_uri: str, *, resumed_from_step: int, wandb: WandbLog | None = None, tensorboard: bool = True
    ) -> None:
        self._store = open_storage(run_uri)
        self._file = BackgroundWriter(self._store, FILE)
        self._lines = self._earlier_lines(resumed_from_step)
        self._tensorboard = _tensorboard(tensorboard_folder(run_uri)) if tensorboard else None
        self._wandb = wandb

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of `step`, readable within seconds. Raises the error of an earlier background write."""
        self._lines.append(seal({"step": step, **values}))
        numbers = {name: STATES[value] if isinstance(value, str) else value for name, value in values.items()}
        report_measured(numbers, step)
        if self._tensorboard:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all: each event wakes a thread, which costs ten times as much as creating it.
            scalars = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in numbers.items()]
            self._tensorboard.add_summary(Summary(value=scalars), step)
        if self._wandb:
            self._wandb.write(step, numbers)
        if self._file.is_due:
            self._file.begin(self._content())

    def flush(self) -> None:
        """Write everything recorded so far, now."""
        self._file.write(self._content())

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of every logged step, earlier attempts included."""
        return [unseal(line) for line in self._lines]

    def close(self) -> None:
        self.flush()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.close()

    def _content(self) -> bytes:
        return b"\n".join(self._lines) + b"\n"

    def _earlier_lines(self, resumed_from_step: int) -> list[bytes]:
        if not resumed_from_step or self._store.stat(FILE) is None:
            return []
        return [seal(line) for line in read_lines(self._store, FILE) if line["step"] <= resumed_from_step]


def _tensorboard(folder: Path) -> FileWriter | None:
    """None, with a warning, where the folder cannot be written, such as a mount for root only."""
    from torch.utils.tensorboard import FileWriter

    try:
        return FileWriter(str(folder))
    except OSError as error:
        print(f"train: warning: no TensorBoard files, {folder} cannot be written: {error.strerror}", flush=True)
        return None


def tensorboard_folder(run_uri: str) -> Path:
    """Folder of TensorBoard files: AIP_TENSORBOARD_LOG_DIR when the service sets it, else the run's own folder."""
    return mounted(os.environ.get("AIP_TENSORBOARD_LOG_DIR") or join_uri(run_uri, "logs"))
