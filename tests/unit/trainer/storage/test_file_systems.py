"""Every errno that a file system answers an operation with that it does not have: the promise is kept, or it is said.

The contract of storages, over a folder that lacks all of them, is in tests/integration/trainer/storage/test_local.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.poor_file_system import ANSWERS, lacking
from tests.support.clock import replace_time
from tests.support.paths import ROOT
from vlmpipe.runs.folders.lock import is_running, take_lock
from vlmpipe.trainer.errors import ExitCode, UserError, from_os_error
from vlmpipe.trainer.storage import file_systems
from vlmpipe.trainer.storage.base import AlreadyExistsError, VersionConflictError
from vlmpipe.trainer.storage.file_systems import change_after, exclusively, limits_of
from vlmpipe.trainer.storage.local import LocalStorage

WORDS = {
    "fsync_folder": "no sync to the disk",
    "flock": "no locks",
    "link": "no hard links",
    "utime": "times that cannot be set",
}
CASES = [(operation, answer) for operation, answers in ANSWERS.items() for answer in answers]
BROKEN = (errno.EIO, errno.ENOSPC, errno.ESTALE)
FAILURES = [*itertools.product(WORDS, BROKEN)]
Lack = Callable[..., None]


@pytest.fixture
def lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lack:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))

    def lack(**answers: str) -> None:
        for (module, name), by in lacking(answers, tmp_path / "store").items():
            monkeypatch.setattr(module, name, by)

    return lack


@pytest.mark.parametrize(("operation", "answer"), CASES)
def test_a_folder_keeps_its_promises(operation: str, answer: str, tmp_path: Path, lack: Lack) -> None:
    lack(**{operation: answer})
    store = LocalStorage(tmp_path / "store")
    store.write("a", b"one")
    store.create("COMMIT", b"one")
    with pytest.raises(AlreadyExistsError):
        store.create("COMMIT", b"two")
    before = store.stat("a")
    assert before
    store.replace("a", b"two", before.version)
    with pytest.raises(VersionConflictError):
        store.replace("a", b"three", before.version)
    store.copy("a", "b/c")
    store.write("a", b"four")
    assert [store.read(name) for name in ("a", "b/c", "COMMIT")] == [b"four", b"two", b"one"]
    assert [info.name for info in store.list()] == ["COMMIT", "a", "b/c"]


@pytest.mark.parametrize(("operation", "answer"), [case for case in CASES if case[0] in WORDS])
def test_what_is_missing_is_said(operation: str, answer: str, tmp_path: Path, lack: Lack) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    assert limits_of(folder).text("runs") == ""
    lack(**{operation: answer})
    assert WORDS[operation] in limits_of(folder).text("runs")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("operation", "answer"), CASES)
def test_a_run_belongs_to_one_process(operation: str, answer: str, tmp_path: Path, lack: Lack) -> None:
    lack(**{operation: answer})
    folder = tmp_path / "store"
    folder.mkdir(exist_ok=True)
    lock = take_lock(folder)
    assert is_running(folder)
    with pytest.raises(UserError, match="is already running"):
        take_lock(folder)
    os.close(lock)
    assert not is_running(folder)


@pytest.mark.parametrize(("operation", "number"), FAILURES)
def test_other_errors_are_errors(operation: str, number: int, tmp_path: Path, lack: Lack) -> None:
    """A disk that fails must not be taken for one that lacks the operation."""
    store = LocalStorage(tmp_path / "store")
    store.write("a", b"one")
    before = store.stat("a")
    assert before
    lack(**{operation: errno.errorcode[number]})
    with pytest.raises(UserError):
        store.create("COMMIT", b"one")
        store.replace("a", b"two", before.version)
    with pytest.raises(OSError):
        limits_of(tmp_path / "store")


@pytest.mark.parametrize("answer", [*ANSWERS["chmod"], *(errno.errorcode[number] for number in BROKEN)])
def test_modes_are_those_that_the_umask_leaves_and_are_never_changed(answer: str, tmp_path: Path, lack: Lack) -> None:
    assert set(ANSWERS) - set(WORDS) == {"chmod"}, "what else is lacking is said"
    lack(chmod=answer)
    store = LocalStorage(tmp_path / "store")
    before = os.umask(0o027)
    try:
        store.write("a", b"one")
        store.create("b", b"one")
        store.copy("a", "c")
    finally:
        os.umask(before)
    assert {(tmp_path / "store" / name).stat().st_mode & 0o777 for name in "abc"} == {0o640}
    assert limits_of(tmp_path / "store").text("runs") == ""


def test_creators_without_links_or_locks_are_kept_apart(tmp_path: Path, lack: Lack) -> None:
    lack(link="EPERM", flock="ENOLCK")
    store = LocalStorage(tmp_path / "store")

    def create(number: int) -> bool:
        try:
            store.create("COMMIT", b"%d" % number)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 1


def test_the_lock_file_of_a_dead_process_is_taken_over(tmp_path: Path, lack: Lack) -> None:
    lack(flock="ENOLCK")
    (tmp_path / "store").mkdir()
    program = (
        "import os, sys; from pathlib import Path; from vlmpipe.trainer.storage.file_systems import _leased\n"
        "with _leased(Path(sys.argv[1])): os._exit(3)"
    )
    lease = tmp_path / "store/.tmp-lock-name-lease"
    done = subprocess.run([sys.executable, "-c", program, str(lease)], cwd=ROOT)
    assert done.returncode == 3 and lease.exists()
    with exclusively(tmp_path / "store/name"):
        assert lease.read_bytes().split()[1] == str(os.getpid()).encode()
    assert not lease.exists()


def test_the_lock_file_of_another_machine_is_taken_over_once_it_stays_the_same(
    tmp_path: Path, lack: Lack, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(flock="ENOLCK")
    (tmp_path / "store").mkdir()
    lease = tmp_path / "store/.tmp-lock-name-lease"
    lease.write_bytes(b"elsewhere 1 abc")
    clock = itertools.count()
    replace_time(monkeypatch, file_systems, monotonic=lambda: float(next(clock)), sleep=lambda seconds: None)
    with exclusively(tmp_path / "store/name"):
        pass
    assert next(clock) > file_systems.LEASE_S and not lease.exists()


def test_a_disk_without_locks_for_other_files_is_named() -> None:
    error = from_os_error(OSError(errno.ENOLCK, "No locks available"), "preparing data in /mnt/scratch")
    assert error.code == ExitCode.CANNOT_WRITE
    assert "set TMPDIR and VLMPIPE_CACHE_DIR to folders of a local disk" in error.fix


def test_the_clock_of_the_file_system_tells_versions_apart_where_times_cannot_be_set(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"content")
        file.flush()
        before_ns = os.fstat(file.fileno()).st_mtime_ns
        for _ in range(3):
            change_after(file.fileno(), before_ns)
            now_ns = os.fstat(file.fileno()).st_mtime_ns
            assert now_ns > before_ns
            before_ns = now_ns
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_lock_file_whose_holder_has_not_written_its_name_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "lease"
    place.write_bytes(b"")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert place.exists(), "it is another's"
        if len(waits) == 3:
            place.unlink()

    replace_time(monkeypatch, file_systems, sleep=wait)
    with file_systems._leased(place):
        assert len(waits) == 3
    assert not place.exists()
