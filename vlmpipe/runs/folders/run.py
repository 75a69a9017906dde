"""A local run: its folder, its marker while it runs, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vlmpipe.runs.folders.lock import name_in_lock
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.state import read_state
from vlmpipe.runs.run_state import STOPPED, RunState
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, from_os_error, os_errors
from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX, join_uri
from vlmpipe.trainer.storage.file_systems import limits_of
from vlmpipe.trainer.storage.user_folders import expanded

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

RELEASED = -1
LOG = "pipeline.log"
RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,127}$")


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
        name_in_lock(self.folder, psutil.Process(pid), os.O_APPEND)

    def release(self) -> None:
        """Release the lock where it is held, so that this process can start the run again."""
        if self.lock != RELEASED:
            os.close(self.lock)
            self.lock = RELEASED


def require_runs_folder(config: RunConfig) -> Path:
    """The folder of this run file's runs. Raises ConfigError when it is not on this machine, UserError when nothing can
    be made in the output folder (exit 73 or 77).
    """
    root = config.output.root_uri.removeprefix("file://")
    if "://" in root:
        raise ConfigError(
            f"output.root_uri is {root}",
            expected="a folder of this machine for a local run",
            fix="add output.root_uri=runs to the command",
        )
    folder = expanded(join_uri(root, "runs"))
    require_writable(folder.parent.absolute())
    return folder


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
