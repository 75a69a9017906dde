"""Small files of a run: training does not wait for them, and nothing that was said last is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.local import LocalStorage

LIMIT_S = 20.0


class Slow(LocalStorage):
    """A store whose writes wait until they are let go, and fail when it is broken."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.written, self.broken = threading.Event(), threading.Event(), False
        self.under_way, self.max_at_once = 0, 0

    def write(self, name: str, data: bytes) -> None:
        self.under_way += 1
        self.max_at_once = max(self.max_at_once, self.under_way)
        assert self.go.wait(LIMIT_S)
        self.under_way -= 1
        self.written.set()
        if self.broken:
            raise UserError("the disk is full")
        super().write(name, data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Slow]:
    found = Slow(tmp_path)
    yield found
    found.go.set()


def until_written(store: Slow) -> None:
    """Wait until the write that was begun has ended."""
    store.go.set()
    assert store.written.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name == "write file":
            thread.join(LIMIT_S)


def test_beginning_a_write_does_not_block(store: Slow) -> None:
    assert BackgroundWriter(store, "file").begin(b"first")
    assert store.stat("file") is None, "the store has not been let go"
    until_written(store)
    assert store.read("file") == b"first"


def test_running_write_is_not_overtaken(store: Slow) -> None:
    file = BackgroundWriter(store, "file")
    assert file.begin(b"first") and not file.begin(b"second")
    until_written(store)
    assert store.read("file") == b"first"


def test_the_last_write_comes_after_the_one_under_way_and_is_stored(store: Slow) -> None:
    file = BackgroundWriter(store, "file")
    file.begin(b"first")
    threading.Timer(0.05, store.go.set).start()
    file.write(b"last")
    assert store.read("file") == b"last" and store.max_at_once == 1


def test_writes_that_fail_are_told_of_once_and_the_next_one_makes_up_for_them(
    store: Slow, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    file, store.broken = BackgroundWriter(store, "file", warn=warnings.append), True
    store.go.set()
    for content in (b"1", b"1 2", b"1 2 3"):
        file.settle(content, limit_s=LIMIT_S)
        assert file.has_failed
    assert len(warnings) == 1 and "file is not written: the disk is full" in warnings[0]
    store.broken = False
    file.settle(b"1 2 3 4", limit_s=LIMIT_S)
    assert store.read("file") == b"1 2 3 4" and not file.has_failed
    assert capsys.readouterr().out.count("is written again") == 1 and len(warnings) == 1


def test_a_store_that_does_not_answer_is_not_waited_for(store: Slow) -> None:
    file = BackgroundWriter(store, "file")
    file.begin(b"first")
    file.settle(b"second", limit_s=0.01)
    until_written(store)
    file.settle(b"third", limit_s=LIMIT_S)
    assert store.read("file") == b"third" and store.max_at_once == 1


def test_the_last_write_raises_its_error(store: Slow) -> None:
    file, store.broken = BackgroundWriter(store, "file"), True
    file.begin(b"first")
    until_written(store)
    with pytest.raises(UserError, match="the disk is full"):
        file.write(b"last")


def test_a_store_that_works_again_takes_the_last_write(store: Slow) -> None:
    file, store.broken = BackgroundWriter(store, "file"), True
    file.begin(b"first")
    until_written(store)
    store.broken = False
    file.write(b"last")
    assert store.read("file") == b"last" and file.begin(b"one more")
