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

PREFIX = "vlmpipe-save-"
LOAD_PREFIX = "vlmpipe-load-"
EXPORT_PREFIX = "vlmpipe-export-"


class Staging:
    """A new folder, locked by this process until `remove`. Raises OSError when it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unnamed = folder.with_name(f".{folder.name}")
        unnamed.mkdir()
        self._lock = os.open(unnamed, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(folder)  # not before: sweep_staging deletes such names without a lock

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@contextlib.contextmanager
def export_folder() -> Iterator[Path]:
    """A folder for the files of one export."""
    staging = Staging(Path(tempfile.gettempdir(), f"{EXPORT_PREFIX}{uuid.uuid4().hex}"))
    try:
        yield staging.folder
    finally:
        staging.remove()


def sweep_staging() -> int:
    """Delete the folders that killed processes have left on this machine. Returns their number."""
    swept = 0
    temporary = Path(tempfile.gettempdir())
    for folder in (path for prefix in (PREFIX, LOAD_PREFIX, EXPORT_PREFIX) for path in temporary.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # locked, already deleted, or another user's
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                swept += 1
            finally:
                os.close(handle)
    return swept
