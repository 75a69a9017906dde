"""`vlmpipe diagnose` for local runs.

Reads the record of the step that failed, the logs of its replicas, and the log of the pipeline, in this order.
"""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from vlmpipe.runs.diagnosis import STALL_IDS, Diagnosis, Text, decide, last_lines, rank_ends, warnings
from vlmpipe.runs.folders.fault_summary import read_faults
from vlmpipe.runs.folders.lock import is_running
from vlmpipe.runs.folders.marker import MARKER, read_marker
from vlmpipe.runs.folders.run import LOG
from vlmpipe.runs.folders.stages import stage_folders
from vlmpipe.runs.folders.state import ATTEMPT_LINE, read_state
from vlmpipe.runs.run_state import STOPPED
from vlmpipe.runs.stack_dumps import read_stall
from vlmpipe.runs.steps import Step
from vlmpipe.trainer.records.step import step_file
from vlmpipe.trainer.storage.records import read_record_file
from vlmpipe.trainer.storage.regular_files import NotRegularFileError, open_regular

LOG_BYTES = 4 << 20  # the end of each log: what ended a job is there
RUN_FILES = (MARKER, "run.json", "steps", "logs")


def is_run_folder(name: str) -> bool:
    """Return whether the folder has files of a run."""
    return Path(name).is_dir() and any(Path(name, file).exists() for file in RUN_FILES)


def diagnose_folder(folder: Path) -> Diagnosis:
    """Diagnose a run's folder, also one downloaded from a bucket."""
    marker = read_marker(folder)
    since_s = marker.started_s if marker else 0.0
    running = marker is not None and is_running(folder)
    state = read_state(folder, now_s=time.time(), since_s=since_s)
    if marker and not running:
        state = state.ended(marker.exit_code)
    step = next((step for step in state.steps if step.state in ("failed", "stopped")), None)
    # Without a marker, the records of killed steps are still open: take the last one.
    step = step or next((step for step in reversed(state.steps) if step.state == "running"), None)
    code = _exit_code(marker.exit_code if marker else None, step)
    if running:
        outcome = "running"
    elif marker:
        outcome = "stopped" if marker.exit_code in STOPPED else "failed" if marker.exit_code else "done"
    else:
        outcome = "failed" if step else "done"
    bad = outcome in ("failed", "stopped")
    of_stage = stage_folders(folder).get(step.stage, folder) if step else folder
    texts = [] if running else _texts(folder, of_stage, step)
    pattern, hit, also = decide(texts, code) if bad else (None, None, warnings(texts))
    ends = rank_ends(texts)
    stall = None
    if pattern and pattern.id in STALL_IDS:
        world_size = int(read_record_file(of_stage / "preflight.json").get("world_size", 0))
        stall = read_stall(of_stage, world_size=world_size, since_s=since_s)
    faults = [
        str(line["faults"])
        for line in read_faults(folder, since_s=since_s)
        if "faults" in line and line["event"] != "missed"
    ]
    return Diagnosis(
        run=folder.resolve().name,
        outcome=outcome,
        step=step.title if step else "",
        exit_code=code,
        pattern=pattern,
        hit=hit,
        also=tuple(also),
        ends=tuple(ends),
        stall=stall,
        notes=tuple(f"ordered by --inject-fault: {text}" for text in faults),
        last_lines=last_lines(texts) if bad and pattern is None else (),
        command=shlex.join([*marker.command, "--run-id", marker.run_id]) if marker else "",
    )


def _exit_code(of_run: int | None, step: Step | None) -> int | None:
    if of_run is not None:
        return of_run
    code = step.detail.get("exit_code") if step else None
    return int(code) if code is not None else None


def _texts(folder: Path, of_stage: Path, step: Step | None) -> list[Text]:
    """Error messages and logs of the run's end, the most informative first."""
    texts = []
    if step and step.detail.get("error"):
        texts.append(Text(step_file(step.name), str(step.detail["error"]), first_line=0))
    names = [step.name] if step else sorted(path.name for path in (of_stage / "logs").glob("*") if path.is_dir())
    first = str(step.detail.get("replica", "")) if step else ""
    logs = [path for name in names for path in sorted((of_stage / "logs" / name).glob("*.log"))]
    for path in sorted(logs, key=lambda path: path.stem != first):
        texts.append(_end_of(path, path.relative_to(folder).as_posix()))
    if (folder / LOG).exists():
        log = _end_of(folder / LOG, LOG)
        earlier, mark, this = log.text.rpartition(ATTEMPT_LINE)
        texts.append(Text(LOG, mark + this, log.first_line + earlier.count("\n")))
    return [text for text in texts if text.text.strip()]


def _end_of(path: Path, where: str) -> Text:
    """The end of a log, and the number of the line it begins in. One that cannot be read says nothing."""
    try:
        with open_regular(path) as file:
            skipped = 0
            for _ in range(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES) // LOG_BYTES):
                skipped += file.read(LOG_BYTES).count(b"\n")
            return Text(where, file.read().decode("utf-8", "replace"), skipped + 1)
    except (OSError, NotRegularFileError):
        return Text(where, "", 1)
