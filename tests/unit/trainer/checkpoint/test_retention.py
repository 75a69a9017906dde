"""Old checkpoints are deleted COMMIT first, and their files at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.support.crash.world import two_committed
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old
from vlmpipe.trainer.storage.local import LocalStorage

WAIT_S = 20.0


class SlowToDelete:
    """A store in which the first two deletions after COMMIT's wait for each other."""

    def __init__(self, store: LocalStorage) -> None:
        self._store, self._together, self._lock = store, threading.Barrier(2), threading.Lock()
        self.deleted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete(self, name: str) -> None:
        with self._lock:
            self.deleted.append(name)
            number = len(self.deleted)
        if number in (2, 3):
            self._together.wait(WAIT_S)
        self._store.delete(name)


def test_files_are_deleted_at_the_same_time_after_their_commit(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "run")
    old, newest = two_committed(store, tmp_path / "scratch")
    slow: Any = SlowToDelete(store)
    assert delete_old(slow, Retention(1), newest=newest) == [old]
    assert slow.deleted[0].endswith(f"{old}/COMMIT") and len(slow.deleted) > 2
    assert committed(store) == [newest]
    assert not [info.name for info in store.list() if old in info.name]
