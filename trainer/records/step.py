"""How far a step of the pipeline is, and how it ended: `steps/<step>.json`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.redaction import redact_all
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record, seal

FOLDER = "steps"


@dataclass
class StepRecord:
    """State of one pipeline step. Times are Unix seconds. Its own process changes it while the step runs."""

    step: str
    state: str = "running"  # running | done | reused | stopped (resumable) | failed
    started_s: FiniteFloat = field(default_factory=time.time)
    ended_s: FiniteFloat = 0.0
    done: FiniteFloat = 0
    total: FiniteFloat = 0
    unit: str = ""
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def sealed(self) -> bytes:
        """Return the file's bytes, without secrets."""
        return seal(redact_all(asdict(self)))

    def write(self, store: Storage) -> None:
        store.write(step_file(self.step), self.sealed())


_FORM = TypeAdapter(StepRecord)


def step_file(step: str) -> str:
    """Return the name of the step's file in the run's folder."""
    return f"{FOLDER}/{step}.json"


def step_of_file(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".json")


def parse_step(step: str, content: Mapping[str, object]) -> StepRecord | None:
    """Return the record with this content, or None where it is empty, of another version, or damaged."""
    if not content:
        return None
    try:
        return _FORM.validate_python({"step": step, "started_s": 0, **content})
    except ValidationError:
        return None


def read_step(store: Storage, step: str) -> StepRecord | None:
    """Return the step's record; None where it has not begun, or another version wrote it. Raises DataError."""
    name = step_file(step)
    return None if store.stat(name) is None else parse_step(step, read_record(store, name))


def require_step(store: Storage, step: str) -> StepRecord:
    """Return the step's record. Raises ConfigError where it has not begun, else as `read_step`."""
    record = read_step(store, step)
    if record is None:
        raise ConfigError(
            f"missing {store.uri(step_file(step))}, which the step {step} writes", fix="run that step first"
        )
    return record


def read_steps(store: Storage) -> list[StepRecord]:
    """Return the records of all steps that have begun. Raises DataError for a damaged one."""
    records = [read_step(store, step_of_file(info.name)) for info in store.list(FOLDER) if info.name.endswith(".json")]
    return [record for record in records if record]
