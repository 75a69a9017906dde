"""A disk that is full, broken or read-only; clocks that lie."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.clock import replace_time
from tests.support.crash.cases import case
from tests.support.crash.world import (
    after_a_fault,
    loaded,
    run_once,
    save,
    two_committed,
    upload,
)
from tests.support.disk import small_disk
from vlmpipe.trainer.checkpoint.commit import FOLDER, checkpoint_name, committed
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import local as storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage

# In the order of one start: claim and begin, two files of node 0, its manifest, one file of node 1, its manifest, ends.
LOCAL_WRITES = {
    "the claim of a start": 0,
    "the note of where it begins": 1,
    "a shard": 2,
    "a node's manifest": 4,
    "the other node's shard": 5,
    "the other node's manifest": 6,
    "COMMIT": 7,
}
LATEST_WRITE = 8
FAULTS = {errno.ENOSPC: ExitCode.CANNOT_WRITE, errno.EIO: ExitCode.UNEXPECTED, errno.EROFS: ExitCode.NO_PERMISSION}


@pytest.fixture
def old(local: LocalStorage, scratch: Path) -> str:
    return two_committed(local, scratch)[1]


@case(
    "disk",
    "the disk is full, broken or read-only (ENOSPC, EIO, EROFS) at the write of {}",
    "the save fails with a message and its exit code; the old checkpoint stays; no temporary file is left",
    write=LOCAL_WRITES,
)
def test_a_write_fails(
    write: str, old: str, local: LocalStorage, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = storage._copy
    for number, code in FAULTS.items():
        writes = iter(range(100))

        def failing(source: IO[bytes], sink: IO[bytes], writes: Iterator[int] = writes, number: int = number) -> int:
            if next(writes) == LOCAL_WRITES[write]:
                sink.write(source.read()[:10])
                raise OSError(number, os.strerror(number), getattr(sink, "name", ""))
            return copy(source, sink)

        before = committed(local)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "_copy", failing)
            with pytest.raises(UserError, match="while writing") as caught:
                run_once(local, scratch, keep=9)
        assert caught.value.code == code
        assert not [path for path in local.root.rglob(".tmp-*") if "lock" not in path.name]
        assert committed(local) == before
    after_a_fault(local, scratch, allowed={committed(local)[-1]})


def test_every_local_write_of_a_start_is_in_the_table(
    old: str, local: LocalStorage, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    copy = storage._copy

    def noting(source: IO[bytes], sink: IO[bytes]) -> int:
        written.append(Path(f"/proc/self/fd/{sink.fileno()}").resolve().parent.name)
        return copy(source, sink)

    monkeypatch.setattr(storage, "_copy", noting)
    run_once(local, scratch)
    assert len(written) == LATEST_WRITE + 1 == max(LOCAL_WRITES.values()) + 2
    assert [written[number] for number in (0, 1, LATEST_WRITE)] == [FOLDER] * 3
    assert "deep" in written[2:4] and written[5] == "deep"  # a node's files are sent at once


@case(
    "disk",
    "the disk fills up (a real small one, or a file size limit) during a save",
    "the save fails with 73; the old one stays",
)
def test_a_real_disk_runs_full(tmp_path: Path, scratch: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = LocalStorage(disk.folder / "run")
        _, old = two_committed(store, scratch)
        with full(disk.folder), pytest.raises(UserError, match="no space left") as caught:
            run_once(store, scratch)
        assert caught.value.code == ExitCode.CANNOT_WRITE
        after_a_fault(store, scratch, allowed={old})


class full:
    """No room for a shard on the disk of `folder`, for as long as the block lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ballast = folder, folder / "ballast"

    def __enter__(self) -> None:
        if os.path.ismount(self._folder):
            with self._ballast.open("wb", buffering=0) as sink:
                try:
                    while sink.write(bytes(1 << 12)):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        else:
            self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self._limit[1]))

    def __exit__(self, *_: object) -> None:
        if self._ballast.exists():
            self._ballast.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)


@case("disk", "the output folder may not be written", "exit 77 before any work")
def test_a_folder_that_may_not_be_written() -> None:
    with pytest.raises(UserError, match="no permission") as caught:  # the one place that root may not write either
        run_once(LocalStorage("/sys/kernel/vlmpipe"), Path("/nowhere"))
    assert caught.value.code == ExitCode.NO_PERMISSION


@case("disk", "temporary files of a killed write are left", "never read as objects; the next start is unaffected")
def test_leftover_temporary_files(old: str, local: LocalStorage, scratch: Path) -> None:
    for folder in (FOLDER, f"{FOLDER}/{old}", f"{FOLDER}/{old}/deep"):
        (local.root / folder / ".tmp-abc").write_bytes(b"half")
    after_a_fault(local, scratch, allowed={old})


@case("disk", "a partial checkpoint of an earlier start is left", "never chosen; deleted once a newer one is committed")
def test_a_leftover_folder(store: Storage, scratch: Path) -> None:
    _, old = two_committed(store, scratch)
    for step, nodes in ((3, range(1)), (4, range(2))):
        upload(store, scratch, checkpoint_name(1, step, "left"), step, nodes=nodes)
    after_a_fault(store, scratch, allowed={old})


@case("clock", "every file has an absurd time, newest first", "the order is that of starts and steps")
def test_file_times_do_not_matter(local: LocalStorage, scratch: Path) -> None:
    names = [save(local, scratch, step, attempt=attempt) for attempt, step in ((1, 1), (1, 2), (2, 1))]
    for number, name in enumerate(names):
        for path in (local.root / FOLDER / name).rglob("*"):
            os.utime(path, ns=(0, 4 * 10**18 // (number + 1)))
    assert loaded(local, scratch).name == names[-1]
    assert committed(local) == names


@case("clock", "a machine's clock is {} hours off", "the order is that of starts and steps", hours=(-24, 24))
def test_clocks_that_are_off(
    hours: int, old: str, local: LocalStorage, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        replace_time(patch, storage, time_ns=lambda: time.time_ns() + hours * 3600 * 10**9)
        newest = run_once(local, scratch, keep=2)
    assert newest > old and loaded(local, scratch).name == newest
    after_a_fault(local, scratch, allowed={newest})
