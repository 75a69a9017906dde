"""Many files at once: order, bounded look-ahead, and the first error ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.storage.base import CorruptObjectError, crc32c_of
from trainer.storage.local import LocalStorage
from trainer.storage.transfer import Upload, fetch_many, in_parallel, upload_many

WAIT_S = 10


def test_files_arrive_and_come_back_in_order(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    names = [f"shards/{number:02d}" for number in range(20)]
    for name in names:
        (tmp_path / Path(name).name).write_bytes(name.encode())
    upload_many(store, (Upload(tmp_path / Path(name).name, name, crc32c_of(name.encode())) for name in names))
    assert [path.read_bytes().decode() for path in fetch_many(store, names)] == names


def test_a_file_that_changed_since_it_was_summed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    store = LocalStorage(tmp_path / "store")
    with pytest.raises(CorruptObjectError):
        upload_many(store, [Upload(tmp_path / "file", "a", crc32c_of(b"other"))])
    assert store.list() == []


def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    together = threading.Barrier(3)  # broken unless three run at once

    def call(number: int) -> int:
        together.wait(WAIT_S)
        return number

    assert list(in_parallel(call, range(9), threads=3)) == list(range(9))


def test_items_are_taken_only_a_little_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = in_parallel(lambda number: number, items(), threads=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert taken <= 3 + 2 * 2
    results.close()
    assert taken < 1000


def test_the_first_error_in_time_wins_and_nothing_further_is_begun() -> None:
    """The second item fails while the first still runs: it is its error, and items behind are never begun."""
    failed, begun = threading.Event(), []

    def call(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise UserError("item 1")
        assert failed.wait(WAIT_S)
        raise UserError(f"item {number}, later")

    with pytest.raises(UserError, match=r"item 1$"):
        list(in_parallel(call, range(100), threads=2))
    assert len(begun) <= 3, "the two threads, and one more that may have begun before the error was known"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]
