"""The record of a job's step, kept by whoever runs the job; the job's own program writes the same file meanwhile."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from trainer.progress import StepRecord
from trainer.redaction import redact_all
from trainer.storage.base import Storage
from trainer.storage.records import read_record, write_record


def open_record(store: Storage, step: str) -> float:
    """Begin the record of a job that is about to start. Returns when that was, in Unix seconds."""
    started_s = time.time()
    _write(store, StepRecord(step, started_s=started_s))
    return started_s


def close_record(
    store: Storage, step: str, state: str, message: str, started_s: float | None, detail: dict[str, Any]
) -> None:
    """Close it. What the job's own program says of itself stays.

    Args:
        started_s: when the job was started, which is before its program; None for one that another had started.
    """
    name = f"steps/{step}.json"
    record = StepRecord(**read_record(store, name)) if store.stat(name) else StepRecord(step)
    record.started_s = record.started_s if started_s is None else started_s
    if record.state == "running" or (state != "done" and record.state != state):
        record.state, record.message = state, message or record.message
    record.ended_s = time.time()
    record.detail.update(detail)
    _write(store, record)


def _write(store: Storage, record: StepRecord) -> None:
    write_record(store, f"steps/{record.step}.json", redact_all(asdict(record)))
