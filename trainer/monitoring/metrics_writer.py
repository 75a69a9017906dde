"""Metrics of a run: `metrics.jsonl`, TensorBoard, and the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from trainer.monitoring.hypertune import report_measured
from trainer.storage import open_storage
from trainer.storage.background_writer import BackgroundWriter
from trainer.storage.base import join_uri, mounted
from trainer.storage.local import LocalStorage
from trainer.storage.records import read_lines, seal, unseal

FILE = "metrics.jsonl"
LOCAL_INTERVAL_S = 0.5  # every write repeats the whole file
REMOTE_INTERVAL_S = 15.0  # one object may be written about once a second
STATES = {"active": 1, "absent": 0}  # words of the log (reduction_server), for places that take numbers alone


class Mirror(Protocol):
    """Another place for the same numbers."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of `step`."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class MetricsLog:
    """One JSON object a logged step. Lines after the step resumed from are dropped: that future did not happen."""

    def __init__(self, run_uri: str, *, resumed_from_step: int, mirrors: Sequence[Mirror] = ()) -> None:
        self._store = open_storage(run_uri)
        self._file = BackgroundWriter(self._store, FILE)
        self._lines = self._earlier_lines(resumed_from_step)
        self._interval_s = LOCAL_INTERVAL_S if isinstance(self._store, LocalStorage) else REMOTE_INTERVAL_S
        self._written_s = time.monotonic()
        self._tensorboard = _tensorboard(tensorboard_folder(run_uri))
        self._mirrors = mirrors

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of `step`, to be readable soon. Raises what an earlier line's write raised."""
        self._lines.append(seal({"step": step, **values}))
        numbers = {name: STATES[value] if isinstance(value, str) else value for name, value in values.items()}
        report_measured(numbers, step)
        if self._tensorboard:
            # One event for all: each one wakes up a thread, which costs ten times as much as making it.
            scalars = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in numbers.items()]
            self._tensorboard.add_summary(Summary(value=scalars), step)
        for mirror in self._mirrors:
            mirror.write(step, numbers)
        if time.monotonic() - self._written_s >= self._interval_s and self._file.begin(self._content()):
            self._written_s = time.monotonic()

    def flush(self) -> None:
        """Make everything recorded so far readable, at once."""
        self._file.write(self._content())
        self._written_s = time.monotonic()

    def column(self, name: str) -> list[float]:
        """One metric of every step that was logged, earlier attempts included."""
        return [line[name] for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        """What was logged of every step, earlier attempts included."""
        return [unseal(line) for line in self._lines]

    def close(self) -> None:
        self.flush()
        if self._tensorboard:
            self._tensorboard.close()
        for mirror in self._mirrors:
            mirror.close()

    def _content(self) -> bytes:
        return b"\n".join(self._lines) + b"\n"

    def _earlier_lines(self, resumed_from_step: int) -> list[bytes]:
        if not resumed_from_step or self._store.stat(FILE) is None:
            return []
        return [seal(line) for line in read_lines(self._store, FILE) if line["step"] <= resumed_from_step]


def _tensorboard(folder: Path) -> FileWriter | None:
    """None, and a warning, where the folder cannot be written: a mount for root alone costs no training."""
    try:
        return FileWriter(str(folder))
    except OSError as error:
        print(f"train: warning: no TensorBoard files, {folder} cannot be written: {error.strerror}", flush=True)
        return None


def tensorboard_folder(run_uri: str) -> Path:
    """Where TensorBoard files go: AIP_TENSORBOARD_LOG_DIR when the service sets it, else the run's own folder."""
    return mounted(os.environ.get("AIP_TENSORBOARD_LOG_DIR") or join_uri(run_uri, "logs"))
