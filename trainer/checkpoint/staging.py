"""Local folders for the files of a checkpoint or export until they are uploaded or loaded.

A killed process leaves its folder behind, and a container that is restarted often would run out of disk. So each start
deletes the folders that no process holds a lock on, of any run on the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from vlmpipe.trainer.errors import print_warning

PREFIX = "vlmpipe-save-"
LOAD_PREFIX = "vlmpipe-load-"
EXPORT_PREFIX = "vlmpipe-export-"


class Staging:
    """A new folder, locked by this process until `remove`. Raises OSError when it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unnamed = folder.with_name(f".{folder.name}")
        unnamed.mkdir()
        self.lock = os.open(unnamed, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        unnamed.rename(folder)  # not before: sweep_staging deletes such names without a lock

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def remove_unless_held(self) -> bool:
        """Delete the folder, unless a process that has inherited `lock` still runs: `sweep_staging` does it later."""
        os.close(self.lock)
        return _delete_unlocked(self.folder)


@contextlib.contextmanager
def export_folder() -> Iterator[Path]:
    """A folder for the files of one export."""
    staging = Staging(Path(tempfile.gettempdir(), f"{EXPORT_PREFIX}{uuid.uuid4().hex}"))
    try:
        yield staging.folder
    finally:
        staging.remove()


@contextlib.contextmanager
def program_folder() -> Iterator[Staging]:
    """A folder for a program that is handed `lock`: it is not deleted, now or by a later start, while that lives."""
    staging = Staging(Path(tempfile.gettempdir(), f"{EXPORT_PREFIX}{uuid.uuid4().hex}"))
    try:
        yield staging
    finally:
        if not staging.remove_unless_held():
            print_warning(f"{staging.folder} is left: the program still runs")


def sweep_staging() -> int:
    """Delete the folders that killed processes have left on this machine. Returns their number."""
    swept = 0
    temporary = Path(tempfile.gettempdir())
    for folder in (path for prefix in (PREFIX, LOAD_PREFIX, EXPORT_PREFIX) for path in temporary.glob(f"{prefix}*")):
        swept += _delete_unlocked(folder)
    return swept


def _delete_unlocked(folder: Path) -> bool:
    """Delete a folder that no process has locked. False when it is locked, not there, or another user's."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
        finally:
            os.close(handle)
    return False
