"""Local staging folder for the files of one checkpoint or export, until they are uploaded.

A process that is killed leaves its folder, as large as the node's share of a checkpoint, and a container that is
started again and again would run out of room. So each start deletes the folders without an owner. An owner holds a lock
on its folder; the system takes it away when the process ends, however it ends. Other runs on the machine keep theirs.
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
EXPORT_PREFIX = "vlmpipe-export-"


def staging_folder(nonce: str, node: int) -> Path:
    """The folder of a node for one save; all its ranks know it by these two."""
    return Path(tempfile.gettempdir(), f"{PREFIX}{nonce}-{node}")


class Staging:
    """A folder that belongs to this process until `remove`. Raises OSError when it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unnamed = folder.with_name(f".{folder.name}")
        unnamed.mkdir()
        self._lock = os.open(unnamed, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(folder)  # only now: what has the name and no lock is taken for a leftover

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
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
    """Delete what killed processes have left on this machine. Returns the number of folders."""
    swept = 0
    temporary = Path(tempfile.gettempdir())
    for folder in [*temporary.glob(f"{PREFIX}*"), *temporary.glob(f"{EXPORT_PREFIX}*")]:
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or of another user
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                swept += 1
            finally:
                os.close(handle)
    return swept
