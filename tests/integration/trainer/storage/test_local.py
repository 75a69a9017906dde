"""The contract of vlmpipe.trainer.storage.base.Storage: one suite over every implementation."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.poor_file_system import ANSWERS, lacking
from tests.support.gcs import TESTBENCH
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import (
    AlreadyExistsError,
    CorruptObjectError,
    Storage,
    VersionConflictError,
    crc32c_of,
)
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.s3 import S3Storage


@pytest.fixture
def poor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """A folder of a file system that has none of what some file systems lack."""
    first = {operation: answers[0] for operation, answers in ANSWERS.items()}
    for (module, name), by in lacking(first, tmp_path / "poor").items():
        monkeypatch.setattr(module, name, by)
    return LocalStorage(tmp_path / "poor")


@pytest.fixture(params=["local", "poor", "gcs", "s3", *(["gcs_testbench"] if TESTBENCH in os.environ else [])])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "root") if request.param == "local" else request.getfixturevalue(request.param)


def test_a_written_object_reads_back(store: Storage) -> None:
    store.write("a/b.json", b"bytes")
    assert store.read("a/b.json") == b"bytes"


def test_an_empty_object_exists(store: Storage) -> None:
    store.write("empty", b"")
    assert store.read("empty") == b""
    assert store.fetch("empty").read_bytes() == b""
    assert [info.size_bytes for info in store.list()] == [0]


def test_a_download_replaces_a_file_of_the_callers_own(store: Storage, tmp_path: Path) -> None:
    store.write("a", b"bytes")
    (tmp_path / "mine").write_bytes(b"longer than that")
    store.download("a", tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == b"bytes"
    with pytest.raises(UserError, match="no such"):
        store.download("b", tmp_path / "mine")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(alphabet="abcXYZ09 ._-+=é@#?%&", min_size=1, max_size=30).filter(lambda text: set(text) != {"."}),
    data=st.binary(max_size=300),
)
def test_any_printable_name_and_any_bytes_round_trip(store: Storage, name: str, data: bytes) -> None:
    store.write(f"folder/{name}", data)
    assert store.read(f"folder/{name}") == data
    assert f"folder/{name}" in [info.name for info in store.list("folder")]
    assert store.fetch(f"folder/{name}").read_bytes() == data


def test_writing_again_replaces_and_changes_the_version(store: Storage) -> None:
    store.write("a", b"old")
    before = store.stat("a")
    store.write("a", b"newer")
    after = store.stat("a")
    assert before and after
    assert store.read("a") == b"newer"
    assert (before.size_bytes, after.size_bytes) == (3, 5)
    assert before.version != after.version


def test_a_missing_object_has_no_stat(store: Storage) -> None:
    assert store.stat("nothing/here") is None


@pytest.mark.parametrize("method", ["read", "fetch"])
def test_reading_a_missing_object_names_it(store: Storage, method: str) -> None:
    with pytest.raises(UserError, match="nothing/here") as caught:
        getattr(store, method)("nothing/here")
    assert caught.value.code == ExitCode.CONFIG


def test_create_refuses_an_existing_object_even_with_equal_bytes(store: Storage) -> None:
    store.create("COMMIT", b"one")
    for data in (b"two", b"one"):
        with pytest.raises(AlreadyExistsError):
            store.create("COMMIT", data)
    assert store.read("COMMIT") == b"one"


def test_one_of_many_creators_wins(store: Storage) -> None:
    def create(number: int) -> int | None:
        try:
            store.create("COMMIT", b"%d" % number)
        except AlreadyExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(create, range(8)) if number is not None]
    assert len(winners) == 1
    assert store.read("COMMIT") == b"%d" % winners[0]


def test_replace_needs_the_version_that_is_there(store: Storage) -> None:
    store.write("CHAMPION", b"1")
    stale = store.stat("CHAMPION")
    assert stale
    store.replace("CHAMPION", b"2", stale.version)
    with pytest.raises(VersionConflictError):
        store.replace("CHAMPION", b"3", stale.version)
    assert store.read("CHAMPION") == b"2"


def test_replace_of_nothing_is_a_creation(store: Storage) -> None:
    store.replace("CHAMPION", b"1", "")
    with pytest.raises(VersionConflictError):
        store.replace("CHAMPION", b"2", "")
    assert store.read("CHAMPION") == b"1"


def test_replace_of_a_deleted_object_conflicts(store: Storage) -> None:
    store.write("CHAMPION", b"1")
    info = store.stat("CHAMPION")
    assert info
    store.delete("CHAMPION")
    with pytest.raises(VersionConflictError):
        store.replace("CHAMPION", b"2", info.version)


def test_concurrent_replaces_lose_no_update(store: Storage) -> None:
    store.write("counter", b"0")

    def increment(_: int) -> None:
        while True:
            info = store.stat("counter")
            assert info
            value = int(store.read("counter"))
            try:
                store.replace("counter", b"%d" % (value + 1), info.version)
            except VersionConflictError:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(20)))
    assert store.read("counter") == b"20"


def test_no_version_of_a_replaced_object_comes_back(store: Storage) -> None:
    """Where times cannot be set, the third version may have the inode of the first, within one tick of the clock."""
    store.write("CHAMPION", b"0")
    versions = []
    for number in range(12):
        info = store.stat("CHAMPION")
        assert info
        versions.append(info.version)
        store.replace("CHAMPION", b"new %d" % number, info.version)
    assert len(set(versions)) == len(versions)


def test_delete_removes_and_may_be_repeated(store: Storage) -> None:
    store.write("a", b"1")
    store.delete("a")
    store.delete("a")
    assert store.stat("a") is None
    assert store.list() == []


def test_list_gives_a_folder_and_what_is_below_it_sorted(store: Storage) -> None:
    names = ["steps/train.json", "steps/a/b/c.json", "steps2/x.json", "steps.json", "run.json", "checkpoints/1/COMMIT"]
    for name in names:
        store.write(name, b"12")
    assert [info.name for info in store.list()] == sorted(names)
    assert [info.name for info in store.list("steps")] == ["steps/a/b/c.json", "steps/train.json"]
    assert store.list("steps/") == store.list("steps")
    assert [info.name for info in store.list("run.json")] == ["run.json"]
    assert store.list("absent") == []
    assert store.list("steps/train.json")[0] == store.stat("steps/train.json")


def test_folders_are_those_with_a_file_directly_in_a_folder(store: Storage) -> None:
    for name in ("runs/b/x.json", "runs/a/deep/COMMIT", "runs/LATEST", "runs2/c/x.json", "runs.json"):
        store.write(name, b"12")
    assert store.folders("runs") == ["a", "b"]
    assert store.folders("runs/a") == ["deep"] and store.folders("runs/b") == []
    assert store.folders("absent") == []
    store.delete("runs/b/x.json")
    if not store.root_uri.startswith("s3://"):  # the server of these tests keeps it
        assert store.folders("runs") == ["a"], "a folder is gone with its last file"


@pytest.mark.parametrize("size_bytes", [0, 1000, 9 << 20, 40 << 20])
def test_an_uploaded_file_is_fetched_with_equal_bytes(store: Storage, tmp_path: Path, size_bytes: int) -> None:
    data = bytes(range(250)) * (size_bytes // 250)
    (tmp_path / "source").write_bytes(data)
    store.upload(tmp_path / "source", "shards/train-000000.tar")
    assert store.fetch("shards/train-000000.tar").read_bytes() == data
    assert store.fetch("shards/train-000000.tar").name == "train-000000.tar"


@pytest.mark.parametrize("size_bytes", [1000, 9 << 20])
def test_an_upload_is_held_to_the_checksum_that_its_caller_gives(
    store: Storage, tmp_path: Path, size_bytes: int
) -> None:
    data = bytes(range(250)) * (size_bytes // 250)
    source = tmp_path / "source"
    source.write_bytes(data)
    store.upload(source, "shard", crc32c=crc32c_of(data))
    source.write_bytes(data[:-1] + b"!")  # as a disk may do between writing and sending
    for name in ("shard", "other"):
        with pytest.raises(CorruptObjectError, match="changed before"):
            store.upload(source, name, crc32c=crc32c_of(data))
    assert store.read("shard") == data, "what was there stays"
    assert [info.name for info in store.list()] == ["shard"]


def test_stored_checksum_is_that_of_the_bytes(store: Storage) -> None:
    store.write("a", b"bytes")
    (listed,), looked_up = store.list(), store.stat("a")
    kept = None if isinstance(store, LocalStorage) else crc32c_of(b"bytes")
    assert looked_up and looked_up.crc32c == crc32c_in(store, listed) == kept
    assert listed.crc32c == (None if isinstance(store, S3Storage) else kept)  # which lists none


def test_deleting_a_folder_leaves_its_neighbours(store: Storage) -> None:
    for name in ("a/1", "a/b/2", "ab/3", "4"):
        store.write(name, b"")
    store.delete_folder("a")
    store.delete_folder("a")
    assert [info.name for info in store.list()] == ["4", "ab/3"]


def test_fetch_sees_a_newer_object(store: Storage) -> None:
    store.write("a", b"old")
    assert store.fetch("a").read_bytes() == b"old"
    store.write("a", b"new")
    assert store.fetch("a").read_bytes() == b"new"


def test_uploading_a_missing_file_names_it(store: Storage, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not-here"):
        store.upload(tmp_path / "not-here", "a")
    assert store.stat("a") is None


def test_a_name_cannot_leave_the_root(store: Storage) -> None:
    for name in ("", ".", "/etc/passwd", "../outside", "a/../../outside", "a\nb", "a\0b"):
        for method in (store.read, store.stat, store.delete, store.fetch, store.uri):
            with pytest.raises(ConfigError, match="unsafe object name"):
                method(name)


def test_a_uri_of_a_name_continues_the_root(store: Storage) -> None:
    assert store.uri("a/b.json") == store.root_uri + "/a/b.json"


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken"):
        store.write("taken", b"bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_an_uploaded_file_is_readable_by_others(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    store = LocalStorage(tmp_path / "root")
    store.upload(tmp_path / "source", "a")
    assert store.path("a").stat().st_mode & 0o777 == 0o644


def test_open_storage_knows_folders(tmp_path: Path) -> None:
    assert open_storage(f"file://{tmp_path}").root_uri == str(tmp_path)


def test_open_storage_refuses_other_schemes() -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        open_storage("hdfs://host/path")


def test_a_copy_has_the_bytes_and_outlives_the_original(store: Storage) -> None:
    store.write("a/one.tar", b"bytes")
    store.write("b/two.tar", b"other")
    for _ in range(2):  # onto another object, then onto itself
        store.copy("a/one.tar", "b/two.tar")
        assert store.read("b/two.tar") == b"bytes"
    store.write("a/one.tar", b"new")
    assert store.read("b/two.tar") == b"bytes"
    store.delete("a/one.tar")
    assert [(info.name, info.size_bytes) for info in store.list()] == [("b/two.tar", 5)]
    with pytest.raises(UserError, match=r"a/one\.tar"):
        store.copy("a/one.tar", "c")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saw no checkpoints would begin anew, and delete those of before."""
    store = LocalStorage(tmp_path)
    store.write("checkpoints/1/COMMIT", b"{}")
    assert store.list("absent") == []

    def scandir(_folder: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="listing"):
        store.list("checkpoints")


@pytest.mark.parametrize("place", [(0, 3), (2, 9), (7, 10), (4, 4), (9, 40), (10, 12), (50, 60)])
def test_a_range_is_what_the_object_has_there(store: Storage, place: tuple[int, int]) -> None:
    store.write("shard", b"0123456789")
    assert store.read_range("shard", *place) == b"0123456789"[slice(*place)]


def test_a_range_of_a_missing_or_an_empty_object(store: Storage) -> None:
    store.write("empty", b"")
    assert store.read_range("empty", 0, 5) == b""
    with pytest.raises(UserError, match=r"missing|no such"):
        store.read_range("absent", 0, 5)


def test_a_range_of_another_version_is_refused(store: Storage) -> None:
    store.write("shard", b"0123456789")
    (listed,) = store.list("shard")
    assert store.read_range("shard", 2, 4, version=listed.version) == b"23"
    store.write("shard", b"01234567890")
    with pytest.raises(VersionConflictError):
        store.read_range("shard", 2, 4, version=listed.version)
