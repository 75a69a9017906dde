"""Stops local runs and reads their logs from another terminal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.runs.local.run import LOG, is_running, lock_holders, lock_owner, run_argument
from vlmpipe.runs.local.summary import RunReport

POLL_S = 0.5


def cancel(report: RunReport) -> bool:
    """Ask the `vlmpipe run` that carries the run out to stop it, as Ctrl-C does; False where it has just ended.

    Where that process was killed, ask the subreaper it left behind, which then kills the run's processes. Raises
    ConfigError for a run that is over, UserError where the process belongs to another user.
    """
    run = report.folder.name
    if not report.running:
        raise ConfigError(
            f"run {run} is over ({report.outcome}), so there is nothing to cancel",
            expected="a run that is running",
            fix=f"vlmpipe status {run_argument(report.folder)}",
        )
    owner = lock_owner(report.folder)
    processes = [owner] if owner else lock_holders(report.folder)
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
    """The pipeline's log, or those of the replicas of one step. Raises UserError where there are none."""
    files = sorted((folder / "logs" / step).glob("*.log")) if step else [folder / LOG]
    if files and all(file.is_file() for file in files):
        return files
    known = sorted(path.name for path in (folder / "logs").glob("*") if path.is_dir())
    raise UserError(
        f"run {folder.name} has no log of {f'step {step}' if step else 'its own'} yet",
        expected=f"one of {', '.join(known)}" if known else "a run whose jobs have begun",
        fix=f"vlmpipe logs {folder.name}, without --step: what the other steps print is there",
        code=ExitCode.NOT_FOUND,
    )


def read_logs(files: list[Path], *, last: int) -> Iterator[str]:
    """Lines of these files, the `last` ones of each (0: all), under the file's name where there are several."""
    for file in files:
        lines = file.read_text("utf-8", "replace").splitlines()
        prefix = f"[{file.stem}] " if len(files) > 1 else ""
        yield from (prefix + line for line in lines[-last:])


def follow_logs(
    folder: Path, files: list[Path], *, last: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """The same, and what is added to the files until the run is over."""
    yield from read_logs(files, last=last)
    with contextlib.ExitStack() as stack:
        streams = {file: stack.enter_context(file.open(encoding="utf-8", errors="replace")) for file in files}
        for stream in streams.values():
            stream.seek(0, os.SEEK_END)
        running = True
        while running:
            running = is_running(folder)  # asked first: what is printed before the end is read below
            for file, stream in streams.items():
                prefix = f"[{file.stem}] " if len(files) > 1 else ""
                yield from (prefix + line.rstrip("\n") for line in stream)
            if running:
                sleep(POLL_S)
