"""A run's lock, and the processes that hold it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from vlmpipe.runs.folders.marker import run_argument
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.base import cache_folder
from vlmpipe.trainer.storage.file_systems import NO_LOCKS
from vlmpipe.trainer.storage.regular_files import NotRegularFileError, open_lock, read_regular

LOCK = "run.lock"
LOCK_BYTES = 1000  # at most
ORPHANS_MAX_S = 90.0  # more than local_runner.GRACE_S, after which a subreaper kills the remaining processes
SAY_EVERY_S, POLL_S = 5.0, 0.25
CLOCK_STEP_S = 2.0  # start times are derived from the clock, which may be set


def take_lock(folder: Path, *, say: Callable[[str], None] = print) -> int:
    """Hold the run's folder until the returned descriptor is closed.

    Subprocesses of a killed `vlmpipe run` still hold the lock while they save their state and end: this waits for them.
    Raises UserError (69) where the process that took the lock lives, or its subprocesses do not end.
    """
    lock = _open_lock(folder)
    try:
        started_s, next_said_s = time.monotonic(), 0.0
        while not _try_lock(lock):
            if lock_owner(folder):
                raise _already_running(folder)
            waited_s = time.monotonic() - started_s
            if waited_s >= ORPHANS_MAX_S:
                raise _orphans_remain(folder)
            if waited_s >= next_said_s:
                say(
                    f"Run {folder.name}: waiting for processes of a killed vlmpipe run to save their state and end "
                    f"({waited_s:.0f} of at most {ORPHANS_MAX_S:.0f} s)"
                )
                next_said_s += SAY_EVERY_S
            time.sleep(POLL_S)
        name_in_lock(folder, psutil.Process(), os.O_TRUNC)
    except BaseException:
        os.close(lock)
        raise
    return lock


def name_in_lock(folder: Path, process: psutil.Process, how: int) -> None:
    """Write its number, and when it started, as numbers are used again, into the lock's file."""
    handle = os.open(folder / LOCK, os.O_WRONLY | os.O_NOFOLLOW | how)
    try:
        os.write(handle, f"{process.pid} {process.create_time()}\n".encode())
    finally:
        os.close(handle)


def _open_lock(folder: Path) -> int:
    """A descriptor to lock: of the folder's own file, or of one on this machine's disk where there are no locks."""
    lock = open_lock(folder / LOCK, 0o644)
    try:
        _try_lock(lock)
        fcntl.flock(lock, fcntl.LOCK_UN)
        return lock
    except OSError as error:
        os.close(lock)
        if error.errno not in NO_LOCKS:
            raise
    return open_lock(_lock_of_this_machine(folder))


def _lock_of_this_machine(folder: Path | str) -> Path:
    locks = cache_folder() / "locks"
    locks.mkdir(exist_ok=True)
    return locks / hashlib.sha256(os.path.realpath(folder).encode("utf-8", "surrogateescape")).hexdigest()


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_owner(folder: Path) -> psutil.Process | None:
    """The process that took the run's lock; None once it has ended."""
    return next(iter(_living(folder)[:1]), None)


def stopper(folder: Path) -> psutil.Process | None:
    """The process that takes a request to stop: the owner, or where a thread of it runs the run, the run's own.

    None once that process has ended.
    """
    return next(iter(_living(folder)[-1:]), None)


def _living(folder: Path) -> list[psutil.Process | None]:
    """The processes that the lock's file names; None for one that has ended."""
    with contextlib.suppress(OSError, UserError):
        return [_process(line) for line in read_regular(folder / LOCK, LOCK_BYTES).splitlines()]
    return []


def _process(line: bytes) -> psutil.Process | None:
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
        pid, created_s = line.split()
        process = psutil.Process(int(pid))
        is_same = abs(process.create_time() - float(created_s)) < CLOCK_STEP_S  # otherwise the pid was reused
        if is_same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def lock_holders(folder: Path) -> list[psutil.Process]:
    """All processes of this user that hold the run's lock, other than this one: its owner and its subreaper."""
    locks, result = {str((folder / LOCK).resolve()), str(_lock_of_this_machine(folder).resolve())}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(file.path in locks for file in process.open_files()):
                result.append(process)
    return result


def _already_running(folder: Path) -> UserError:
    run = run_argument(folder)
    return UserError(
        f"run {folder.name} is already running, in another process",
        expected="one process for each run",
        fix=f"to watch it: vlmpipe status {run} --watch\nto stop it: vlmpipe cancel {run}\n"
        "to start another run: add --fresh",
        code=ExitCode.UNAVAILABLE,
    )


def _orphans_remain(folder: Path) -> UserError:
    pids = ", ".join(str(process.pid) for process in lock_holders(folder))
    return UserError(
        f"processes that a killed vlmpipe run of {folder.name} left have not ended in {ORPHANS_MAX_S:.0f} s: {pids}",
        expected="a run without processes of an earlier attempt",
        fix=f"to end them: vlmpipe cancel {run_argument(folder)}; then run the same command again",
        code=ExitCode.UNAVAILABLE,
    )


def is_running(folder: Path | str) -> bool:
    """Return whether a process holds the run's lock."""
    try:
        return _is_held(f"{folder}/{LOCK}")
    except NotRegularFileError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return False
    try:
        return _is_held(str(_lock_of_this_machine(folder)))
    except (OSError, NotRegularFileError):
        return False


def _is_held(lock_file: str) -> bool:
    """Return whether another process holds a lock. Raises OSError where there is no file, or are no locks."""
    lock = open_lock(lock_file, create=False)
    try:
        return not _try_lock(lock)
    finally:
        os.close(lock)
