"""A local run: its marker, its lock, and the processes that hold it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from vlmpipe.platforms.local.runs.state import read_state
from vlmpipe.runs.run_state import STOPPED, RunState
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, from_os_error, os_errors
from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX, cache_folder, join_uri
from vlmpipe.trainer.storage.file_systems import NO_LOCKS, limits_of
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import damaged_record, is_whole, record_bytes, record_in, write_record
from vlmpipe.trainer.storage.regular_files import NotRegularFileError, open_lock, read_regular
from vlmpipe.trainer.storage.user_folders import expanded

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

DEFAULT_ROOT = "runs"  # the default of output.root_uri
MARKER = "local.json"
LOCK = "run.lock"
_VERSION = b'"version": 1'  # of a marker as `Marker.write` writes it
RELEASED = -1
LOCK_BYTES = 1000  # at most
LOG = "pipeline.log"
ORPHANS_MAX_S = 90.0  # more than local_runner.GRACE_S, after which a subreaper kills the remaining processes
SAY_EVERY_S, POLL_S = 5.0, 0.25
CLOCK_STEP_S = 2.0  # start times are derived from the clock, which may be set
RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,127}$")


@dataclass(frozen=True)
class Marker:
    """`local.json` in a run's folder: which run file it runs, and how its last attempt ended.

    name: of the run file; empty in records of earlier versions of vlmpipe.
    subcommand: that derived the run file from another, such as curve; empty for `vlmpipe run`.
    """

    run_id: str
    config_digest: str
    arguments: tuple[str, ...]  # run file and overrides, as given
    started_s: FiniteFloat
    ended_s: FiniteFloat = 0.0
    exit_code: int | None = None  # None while it runs, and after a kill
    version: int = 1
    name: str = ""
    subcommand: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that continues this run."""
        return ("vlmpipe", self.subcommand or "run", *self.arguments)

    @property
    def finished(self) -> bool:
        return self.exit_code == 0

    @property
    def shown_command(self) -> str:
        return _joined(self.command)

    def outcome(self, *, running: bool) -> str:
        """running, done, stopped or failed."""
        if running:
            return "running"
        if self.exit_code in STOPPED:
            return "stopped"
        return "failed" if self.exit_code else "done"

    def write(self, folder: Path) -> None:
        write_record(LocalStorage(folder), MARKER, asdict(self), indent=1)


_joined = functools.lru_cache(256)(shlex.join)  # runs have commands in common


def read_marker(folder: Path | str) -> Marker | None:
    """The marker of the run in `folder`, or None when it was not started by `vlmpipe run`.

    Raises DataError for a damaged one.
    """
    path = f"{folder}/{MARKER}"
    data = record_bytes(path)
    if is_whole(data) and _VERSION in data:
        try:  # in one pass: a folder may have 10,000 runs
            marker = _form().validate_json(data, strict=True)
            if marker.version == 1:
                return marker
        except ValidationError:
            pass
    raw = record_in(data, path)
    if raw.get("version") != 1:
        return None
    try:
        return _form().validate_python(raw)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise damaged_record(path, f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error


def require_marker(folder: Path) -> Marker:
    """The marker of the run in `folder`. Raises ConfigError where there is none, DataError for a damaged one."""
    marker = read_marker(folder)
    if marker is None:
        raise ConfigError(f"no run in {folder}", expected=f"a folder with {MARKER}, which vlmpipe run writes")
    return marker


@functools.cache
def _form() -> TypeAdapter[Marker]:
    return TypeAdapter(Marker)


@dataclass
class LocalRun:
    """A run that is about to start; its lock is held while this process or the pipeline lives."""

    folder: Path
    marker: Marker
    earlier: Marker | None  # of the attempt that this one continues
    lock: int
    notes: tuple[str, ...] = ()  # what has changed since, or which run could be continued instead
    is_named: bool = False  # chosen by --run-id, with which --fresh is refused

    @property
    def log(self) -> Path:
        return self.folder / LOG

    def introduction(self) -> list[str]:
        """The first lines of output: whether this run is new, where its log is, and what the file system lacks."""
        with os_errors(f"looking at the file system of {self.folder}"):
            limits = limits_of(self.folder).text(str(self.folder))
        notes = [*self.notes, *([f"Note: {limits}"] if limits else [])]
        if self.earlier is None:
            return [f"Starting run {self.folder.name}", *notes, f"Log: {self.log}"]
        ended = self.earlier.exit_code
        how = "was stopped" if ended in STOPPED else f"failed with exit code {ended}" if ended else "was finished"
        instead = "" if self.is_named else " (--fresh starts a new one)"
        first = f"Continuing run {self.folder.name}, which {how}{instead}"
        return [first, *notes, f"Log: {self.log}"]

    def state(self) -> RunState:
        return read_state(self.folder, now_s=time.time(), since_s=self.marker.started_s)

    def close(self, exit_code: int) -> None:
        """Record how this attempt ended, and release the lock."""
        self.marker = replace(self.marker, exit_code=exit_code, ended_s=time.time())
        # On a full disk the record stays as it was at the start, like a killed attempt's: it is continued as well.
        with contextlib.suppress(UserError):
            self.marker.write(self.folder)
        self.release()

    def name_stopper(self, pid: int) -> None:
        """Let `vlmpipe cancel` ask this process to stop, not the one that holds the lock: that may be a web server."""
        _name_in_lock(self.folder, psutil.Process(pid), os.O_APPEND)

    def release(self) -> None:
        """Release the lock where it is held, so that this process can start the run again."""
        if self.lock != RELEASED:
            os.close(self.lock)
            self.lock = RELEASED


def runs_folder(config: RunConfig) -> Path:
    """The folder of this run file's runs. Raises ConfigError when it is not on this machine."""
    root = config.output.root_uri.removeprefix("file://")
    if "://" in root:
        raise ConfigError(
            f"output.root_uri is {root}",
            expected="a folder of this machine for a local run",
            fix="add output.root_uri=runs to the command",
        )
    return expanded(join_uri(root, "runs"))


def require_writable(root: Path) -> Path:
    """Raise UserError unless a folder can be made in `root`, the output folder, or in the nearest one above it.

    Returns the existing folder.
    """
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"output.root_uri is {root}, but {existing} is not a folder",
            expected="a folder, or the path of one to make",
            fix="set output.root_uri to another path",
        )
    try:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=existing):
            return existing
    except OSError as error:
        forbidden = from_os_error(error, "").code == ExitCode.NO_PERMISSION
        raise UserError(
            f"output.root_uri is {root}, and nothing can be made in {existing}: {error.strerror}",
            expected="a folder that this user may write, on a disk with free space",
            fix="change its permissions, free space, or set output.root_uri to another folder",
            code=ExitCode.NO_PERMISSION if forbidden else ExitCode.CANNOT_WRITE,
        ) from error


def all_markers(folder: Path) -> list[Marker]:
    """The markers of all runs in a folder of runs, oldest first. One file of each run is opened.

    Folders that this user may not read, such as a disk's lost+found, have no runs of this user.
    """
    result = []
    for path in paths_in(folder):
        with where_permitted():
            result.append(read_marker(path))
    return sorted((marker for marker in result if marker), key=lambda marker: marker.started_s)


@contextlib.contextmanager
def where_permitted() -> Iterator[None]:
    """End the block at what this user may not read."""
    try:
        yield
    except UserError as error:
        if error.code != ExitCode.NO_PERMISSION:
            raise


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder by their names, without hidden ones; none where it is missing."""
    return list(map(Path, paths_in(folder)))


def paths_in(folder: Path) -> list[str]:
    """The paths of these folders."""
    paths: list[str] = []
    is_missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with os_errors(f"listing {folder}"), is_missing, os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    return sorted(paths)


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
        _name_in_lock(folder, psutil.Process(), os.O_TRUNC)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _name_in_lock(folder: Path, process: psutil.Process, how: int) -> None:
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


def run_argument(folder: Path) -> str:
    """The run's name on the command line: its id under the default root, else its folder."""
    return folder.name if folder.parent == Path(DEFAULT_ROOT, "runs") else str(folder)


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
