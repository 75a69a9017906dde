"""Metrics of a run: `metrics.jsonl`, and copies on trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.monitoring.hypertune import report_measured
from vlmpipe.trainer.monitoring.trackers import Tracker
from vlmpipe.trainer.monitoring.train_job_status import ENDED_EARLY
from vlmpipe.trainer.records.metrics import FILE, read_metrics
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.records import seal, unseal

STATES = {"active": 1, "absent": 0}  # words in the log (reduction_server) as numbers


class MetricsLog:
    """One JSON object per logged step. Drops the lines of an earlier attempt after the step resumed from.

    Lines that cannot be written are kept, and written later; `warn` is told of the first time.
    """

    def __init__(
        self,
        run_uri: str,
        *,
        resumed_from_step: int,
        trackers: Sequence[Tracker] = (),
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self._store = open_storage(run_uri)
        self._file = BackgroundWriter(self._store, FILE, warn=warn)
        self._lines = self._earlier_lines(resumed_from_step)
        self._trackers = trackers

    def write(self, step: int, values: dict[str, object]) -> None:
        """Record the metrics of `step`, readable within seconds."""
        self._lines.append(seal({"step": step, **values}))
        self._track(step, values)

    def amend(self, step: int, values: dict[str, object]) -> None:
        """Add metrics that were measured after the newest line, that of `step`, was recorded."""
        line = self.line_of(step)
        assert line is not None
        self._lines[-1] = seal(line | values)
        self._track(step, values)

    def line_of(self, step: int) -> dict[str, object] | None:
        """The newest line, where it is that of `step`."""
        line = unseal(self._lines[-1]) if self._lines else None
        return line if line and line["step"] == step else None

    def flush(self) -> None:
        """Write everything recorded so far, now; after some seconds training does not wait for it."""
        self._file.settle(self._content())

    def store(self) -> None:
        """Write everything recorded so far. Raises UserError when the store does not take it."""
        self._file.write(self._content())

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of every logged step, earlier attempts included."""
        return [unseal(line) for line in self._lines]

    def end_early(self, step: int) -> None:
        """Tell the trackers that training has ended with `step`, before the last one that was planned."""
        for tracker in self._trackers:
            tracker.write(step, {ENDED_EARLY: 1.0})

    def close(self) -> None:
        """Flush, and close the trackers."""
        self.flush()
        for tracker in self._trackers:
            tracker.close()

    def _track(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: STATES[value] if isinstance(value, str) else value for name, value in values.items()}
        report_measured(numbers, step)
        for tracker in self._trackers:
            tracker.write(step, numbers)
        if self._file.is_due:
            self._file.begin(self._content())

    def _content(self) -> bytes:
        return b"".join(line + b"\n" for line in self._lines)

    def _earlier_lines(self, resumed_from_step: int) -> list[bytes]:
        lines = read_metrics(self._store) if resumed_from_step else []
        return [seal(line.figures) for line in lines if line.step <= resumed_from_step]
