"""Mirroring beside training: the newest is copied, errors are tried again, and the lag says what is not copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crash.world import save
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import FOLDER, committed
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror, MirrorLag
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage

DEADLINE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Mirror(LocalStorage):
    """A folder that cannot be reached while `broken`, and lets a writer pass only while `opened`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken = False
        self.tries = 0
        self.reached, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        self.tries += 1
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        if self.broken:
            raise UserError("the bucket does not answer", code=ExitCode.UNAVAILABLE)
        super().upload(path, name, crc32c=crc32c)


@pytest.fixture
def store(memory: Path) -> LocalStorage:
    store = LocalStorage(memory / "run")
    claim_attempt(store, fresh=False)
    return store


@pytest.fixture
def mirror(memory: Path) -> Mirror:
    return Mirror(memory / "mirror")


def until(holds: Callable[[], bool]) -> None:
    """Wait for the thread."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_waits_is_overtaken_and_old_copies_go(store: LocalStorage, mirror: Mirror, memory: Path) -> None:
    clock = Clock()
    copies = BackgroundMirror(store, mirror, Retention(1), copied_step=0, clock=clock)
    assert copies.lag(7) == MirrorLag(7, 0.0)
    mirror.opened.clear()
    for step in (1, 2, 3):
        copies.submit(save(store, memory, step))
        clock.now_s += 10
        assert mirror.reached.wait(DEADLINE_S)  # the first one is on its way
    assert copies.lag(4) == MirrorLag(4, 30.0)
    mirror.opened.set()
    until(lambda: copies.lag(4) == MirrorLag(1, 0.0))
    (newest,) = committed(mirror)
    assert verify(mirror, newest).record.step == 3
    assert not mirror.list(f"{FOLDER}/{committed(store)[1]}"), "the second one was never copied"


def test_an_error_is_told_and_tried_again(store: LocalStorage, mirror: Mirror, memory: Path) -> None:
    mirror.broken = True
    copies = BackgroundMirror(store, mirror, Retention(1), copied_step=0, retry_s=0.01)
    name = save(store, memory, 1)
    copies.submit(name)
    until(lambda: mirror.tries > 8)  # of three files
    assert copies.lag(2).error == "the bucket does not answer" and copies.lag(2).steps == 2
    mirror.broken = False
    until(lambda: copies.lag(2) == MirrorLag(1, 0.0))
    assert committed(mirror) == [name]


def test_a_checkpoint_that_training_deletes_meanwhile(store: LocalStorage, mirror: Mirror, memory: Path) -> None:
    copies = BackgroundMirror(store, mirror, Retention(1), copied_step=0)
    mirror.opened.clear()
    deleted = save(store, memory, 1)
    copies.submit(deleted)
    assert mirror.reached.wait(DEADLINE_S)
    store.delete_folder(f"{FOLDER}/{deleted}")
    mirror.broken = True
    mirror.opened.set()
    until(lambda: "was deleted while it was copied" in copies.lag(1).error)
    mirror.broken = False
    copies.submit(save(store, memory, 2))
    until(lambda: copies.lag(2) == MirrorLag(0, 0.0))
    assert [verify(mirror, name).record.step for name in committed(mirror)] == [2]
    assert not mirror.list(f"{FOLDER}/{deleted}"), "what had arrived of it is deleted"
