"""State of a local run from its files: steps, training progress, results.

Missing and damaged records are left out, so that a view never ends a run; `report_of` names the damaged ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmpipe.runs.folders.stages import is_sweep, stage_folders
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import (
    DECIDING,
    EARLIER,
    OF_A_SWEEP,
    Step,
    step_of_record,
    steps_of,
    with_reused_stages,
    without_absent,
)
from vlmpipe.trainer.errors import UNEXPECTED_PREFIX, DataError
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.records.step import StepRecord, read_step
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import unseal
from vlmpipe.trainer.storage.regular_files import NotRegularFileError, open_regular

METRICS_TAIL_BYTES = 1 << 14
LOG_TAIL_BYTES = 1 << 17
RATE_LINES = 5  # metrics lines that the remaining time is judged by
# kfp indents what a step prints, and a job puts the replica's name before it.
ERROR_LINES = [
    re.compile(rf"^(?P<prefix>\s*(\[[^]]*\] )?){start}(?P<text>.*)$")
    for start in ("error: ", f"(?={UNEXPECTED_PREFIX})")  # an unexpected one may be the consequence of another
]
LABEL, UNDER_LABEL = re.compile(r"  (expected|to do):"), " " * 12
TRACEBACK = re.compile(r'  File ".*", line \d+')
ATTEMPT_LINE = "vlmpipe: this attempt started at"  # in pipeline.log, which holds all attempts
_AGGREGATED = ("reused", "done", "failed", "stopped", "running")  # of several steps the last one in this order counts


def read_state(folder: Path, *, now_s: float, since_s: float = 0.0) -> RunState:
    """The state of the run in `folder`. Steps that began before `since_s` belong to an earlier attempt: they wait."""
    folders, sweeps = stage_folders(folder), is_sweep(folder)
    last = list(folders)[-1]
    steps = without_absent(
        replace(
            _step_of_sweep(folder, name, now_s, since_s)
            if sweeps and stage == last and name in OF_A_SWEEP
            else _step(folders.get(stage, folder), name, now_s, since_s),
            stage=stage,
        )
        for stage, name in steps_of(list(folders), sweeps=sweeps)
    )
    state = RunState(folder.name, with_reused_stages(steps))
    if sweeps and state.stage == last:
        return state
    train = state.step("train")
    # Until the first step is done, the file is an earlier attempt's.
    lines = _metrics_tail(folders[state.stage] / METRICS_FILE) if train.done else []
    return replace(state, metrics=lines[-1] if lines else {}, train_eta_s=_train_eta_s(train, lines))


def results_folder(folder: Path, *, since_s: float) -> Path:
    """Where a run's results are: its folder, or of a run that an earlier stage's gate ended, that stage's folder.

    `since_s`: when the run's last attempt began; a gate that decided before does not count.
    """
    for place in reversed(stage_folders(folder).values()):
        records = (_record(place, name, since_s) for name in DECIDING)
        if any(record and record.state in ("done", "reused") for record in records):
            return place
    return folder


def _step(folder: Path, name: str, now_s: float, since_s: float) -> Step:
    record = _record(folder, name, since_s)
    if not record:
        return _earlier(folder, name, now_s, since_s)
    elapsed_s = max(0.0, (record.ended_s or now_s) - record.started_s)
    return step_of_record(record, elapsed_s)


def _step_of_sweep(folder: Path, name: str, now_s: float, since_s: float) -> Step:
    """A step of a sweep, of which several run side by side: their sum."""
    from vlmpipe.runs.folders.sweep import sweep_records, work_done

    paths, outcomes, trainings = sweep_records(folder, name)
    if not paths:
        return _step(folder, name, now_s, since_s)
    records = [record for path in paths if (record := _record(path.parents[1], path.stem, since_s))]
    if not records:
        return Step(name)
    states = {record.state for record in records}
    is_over = "running" not in states and (name != "train-variants" or outcomes >= trainings)
    state = "running" if not is_over else "stopped" if "stopped" in states else max(states, key=_AGGREGATED.index)
    began_s = min(record.started_s for record in records)
    ended_s = max(record.ended_s for record in records) if is_over else now_s
    result = Step(name, state, max(0.0, ended_s - began_s), started_s=began_s, message=records[-1].message)
    if name == "train-variants":
        return replace(result, done=outcomes, total=trainings, unit="trainings", work=work_done(folder), message="")
    return replace(result, done=sum(record.done for record in records), total=sum(record.total for record in records))


def _record(folder: Path, name: str, since_s: float) -> StepRecord | None:
    try:
        record = read_step(LocalStorage(folder), name)
    except DataError:
        return None
    return record if record and record.started_s and record.started_s >= since_s else None


def _earlier(folder: Path, name: str, now_s: float, since_s: float) -> Step:
    """A step that has not begun while other steps do a part of its work; there are several of the second kind."""
    for kind in EARLIER.get(name, ()):
        paths = sorted((folder / "steps").glob(f"{kind}*.json"))
        records = [record for path in paths if (record := _record(folder, path.stem, since_s))]
        if any(record.state == "running" for record in records):
            began_s = min(record.started_s for record in records)
            done, total = (sum(getattr(record, field) for record in records) for field in ("done", "total"))
            unit, message = records[0].unit, f"{kind} is running"
            elapsed_s = max(0.0, now_s - began_s)
            return Step(name, "running", elapsed_s, done, total, unit, message, started_s=began_s)
    return Step(name)


def _metrics_tail(path: Path) -> list[dict[str, object]]:
    result = []
    for line in read_tail(path, METRICS_TAIL_BYTES).splitlines()[-RATE_LINES:]:
        with contextlib.suppress(ValueError):  # the first line of the tail may be half a line
            result.append(unseal(line.encode()))
    return result


def read_tail(path: Path, num_bytes: int) -> str:
    """The last bytes of a text file, or "" when there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read().decode("utf-8", "replace")
    except (OSError, NotRegularFileError):
        return ""


def _train_eta_s(train: Step, lines: list[dict[str, Any]]) -> float | None:
    """Seconds left of training at the speed of the last steps: after a resume, the average is misleading."""
    seconds = [line["step_s"] for line in lines if isinstance(line.get("step_s"), int | float)]
    if train.state != "running" or not seconds or not train.total:
        return train.eta_s
    return max(0.0, train.total - train.done) * sum(seconds) / len(seconds)


def first_error(folder: Path) -> list[str]:
    """The first error message in the log of this attempt; later ones are consequences.

    Each step's record holds its own error; the log is read for when the record could not be written.
    """
    tail = read_tail(folder / "pipeline.log", LOG_TAIL_BYTES)
    lines = tail.rpartition(ATTEMPT_LINE)[2].splitlines()
    for form, (number, line) in itertools.product(ERROR_LINES, enumerate(lines)):
        if match := form.match(line):
            return [match["text"], *_clauses(lines[number + 1 :], match["prefix"])]
    return []


def _clauses(lines: Iterable[str], prefix: str) -> Iterator[str]:
    """The lines after an error's first line, in the form of `UserError.text`.

    Other threads and processes write to the same log, for example tracebacks, which are indented as well.
    """
    begun = labelled = False
    for line in lines:
        if not line.startswith(f"{prefix}  "):
            return
        text = line.removeprefix(prefix)
        if LABEL.match(text):
            labelled = True
        elif TRACEBACK.match(text) or not text.startswith(UNDER_LABEL if labelled else " " * 2):
            return
        if not begun and text.startswith(" " * 3):
            return
        begun = True
        yield text
