"""Temporary folders of preparations, and the removal of those whose process was killed."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmpipe.trainer.errors import os_errors

PREFIX, LOCK = "vlmpipe-data-", ".lock"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, which is removed with its content at the end.

    Its owner holds a lock on a file beside it, which the system releases however the process ends: a folder whose lock
    is free is no longer in use and is removed by the next preparation on this disk.
    """
    root = Path(tempfile.gettempdir())
    with os_errors(f"preparing data in {root}"):
        sweep(root)
        with tempfile.NamedTemporaryFile(prefix=PREFIX, suffix=LOCK, dir=root) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Path(lock.name.removesuffix(LOCK))
            folder.mkdir(mode=0o700)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> int:
    """Remove the folders below `root` whose owners are gone. Returns their number."""
    removed = 0
    for path in root.glob(f"{PREFIX}*{LOCK}"):
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = Path(str(path).removesuffix(LOCK))
                if not folder.is_dir():
                    continue  # its owner has just made the lock
                shutil.rmtree(folder, ignore_errors=True)
                path.unlink(missing_ok=True)
                removed += 1
        except OSError:  # in use, of another user, or removed meanwhile
            continue
    return removed
