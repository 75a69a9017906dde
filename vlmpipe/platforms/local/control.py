"""Stops local runs and reads their logs from another terminal."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TextIO

import psutil

from vlmpipe.runs.folders.lock import is_running, lock_holders, lock_owner, stopper
from vlmpipe.runs.folders.marker import run_argument
from vlmpipe.runs.folders.run import LOG
from vlmpipe.runs.folders.stages import stage_folders
from vlmpipe.runs.folders.summary import RunReport
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.regular_files import open_regular

POLL_S = 0.5
# KFP's local runner stamps its own lines with the time of day, and those of components with date and time.
_STAMP = re.compile(r"(?:vlmpipe: [\w ]+ at |\s*\[KFP Executor )?(\d{4}-\d\d-\d\d )?(\d\d:\d\d:\d\d(?:[.,]\d{3})?)\b")
_TASK = re.compile(r"Executing task (?:\x1b\[\d+m)?'([\w-]+)'")


def cancel(report: RunReport) -> bool:
    """Ask the run's `vlmpipe run` process to stop, as Ctrl-C does, or the run of a thread; False where it has ended.

    If that process was killed, ask its subreaper, which then kills the run's processes. Raises ConfigError for a run
    that is over, UserError where the process belongs to another user.
    """
    run = report.folder.name
    if not report.running:
        raise ConfigError(
            f"run {run} is over ({report.outcome}), so there is nothing to cancel",
            expected="a run that is running",
            fix=f"vlmpipe status {run_argument(report.folder)}",
        )
    asked = stopper(report.folder)
    left = [] if lock_owner(report.folder) else lock_holders(report.folder)
    processes = [asked] if asked else left
    for process in processes:
        try:
            process.terminate()
        except psutil.AccessDenied as error:
            raise UserError(
                f"run {run} was started by another user: process {process.pid}",
                expected="a run of your own",
                fix=f"ask them, or, as root: kill -TERM {process.pid}",
                code=ExitCode.NO_PERMISSION,
            ) from error
        except psutil.NoSuchProcess:
            return False
    return bool(processes)


def log_files(folder: Path, step: str = "") -> list[Path]:
    """The pipeline's log, or those of the replicas of one step, in whose name its stage comes first.

    Raises UserError where there are none.
    """
    known = {
        f"{stage}-{path.name}" if stage else path.name: path
        for stage, place in stage_folders(folder).items()
        for path in sorted((place / "logs").glob("*"))
        if path.is_dir()
    }
    files = (sorted(known[step].glob("*.log")) if step in known else []) if step else [folder / LOG]
    if files and all(file.is_file() for file in files):
        return files
    raise UserError(
        f"run {folder.name} has no log of {f'step {step}' if step else 'its own'} yet",
        expected=f"one of {', '.join(known)}" if known else "a run whose jobs have begun",
        fix=f"vlmpipe logs {folder.name}, without --step, shows the output of the other steps",
        code=ExitCode.NOT_FOUND,
    )


@dataclass(frozen=True)
class LogLine:
    """One line of a log. `time` is the newest time stamp up to here, ISO 8601; empty where the log has none."""

    time: str
    step: str
    process: str
    text: str


class LogFile:
    """Parses the lines of one log in order. Lines in the pipeline's log name the step that follows."""

    def __init__(self, path: Path, step: str = "") -> None:
        self.path, self._is_pipeline = path, path.name == LOG
        self._step = "" if self._is_pipeline else step or path.parent.name
        self._time: datetime | None = None

    def parse(self, text: str) -> LogLine:
        if stamp := _STAMP.match(text):
            with contextlib.suppress(ValueError):  # digits that are no time
                self._advance(*stamp.groups())
        if self._is_pipeline and (task := _TASK.search(text)):
            self._step = task[1]
        stamped = self._time.astimezone().isoformat(timespec="milliseconds") if self._time else ""
        return LogLine(stamped, self._step, self.path.stem, text)

    def _advance(self, date: str | None, clock: str) -> None:
        if date:
            self._time = datetime.fromisoformat(date + clock)
        elif self._is_pipeline and self._time:
            time = datetime.fromisoformat(f"{self._time.date()} {clock}")
            self._time = time + timedelta(days=time < self._time)  # past midnight


def read_logs(files: list[Path], *, step: str = "", last: int) -> Iterator[LogLine]:
    """Lines of these files, the `last` ones of each; 0: all. `step`: its name; default the folder's."""
    for file in files:
        log = LogFile(file, step)
        with _opened(file) as stream:
            yield from [log.parse(line) for line in stream.read().splitlines()][-last:]


def _opened(path: Path) -> TextIO:
    with os_errors(f"reading {path}"):
        file = open_regular(path)
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace")


def follow_logs(
    folder: Path, files: list[Path], *, step: str = "", last: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[LogLine]:
    """Yield the last lines of the logs, and new lines until the run is over."""
    logs = [LogFile(file, step) for file in files]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(_opened(log.path)) for log in logs]
        for log, stream in zip(logs, streams, strict=True):
            yield from [log.parse(line.rstrip("\n")) for line in stream][-last:]
        running = True
        while running:
            running = is_running(folder)  # asked first: lines printed before the end are read below
            for log, stream in zip(logs, streams, strict=True):
                yield from (log.parse(line.rstrip("\n")) for line in stream)
            if running:
                sleep(POLL_S)
