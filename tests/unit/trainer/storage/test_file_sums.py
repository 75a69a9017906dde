"""Sums of large files are read once by a machine's processes, and again when a file has changed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vlmpipe.trainer.storage import file_sums
from vlmpipe.trainer.storage.base import crc32c_of, crc32c_of_file
from vlmpipe.trainer.storage.file_sums import FileSum, SummedFile


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files that were read, of which no size is too small to remember."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(file_sums, "REMEMBERED_BYTES", 0)
    found: list[Path] = []
    monkeypatch.setattr(file_sums, "crc32c_of_file", lambda path: found.append(path) or crc32c_of_file(path))
    return found


def test_one_of_several_processes_reads_a_file(tmp_path: Path, read: list[Path]) -> None:
    (path := tmp_path / "file").write_bytes(b"content")
    with ThreadPoolExecutor(8) as pool:  # each takes the lock by a descriptor of its own, as processes do
        sums = set(pool.map(FileSum.once_a_machine, [path] * 8))
    assert sums == {FileSum(7, crc32c_of(b"content"))} and read == [path]


def test_a_changed_file_is_read_again(tmp_path: Path, read: list[Path]) -> None:
    (path := tmp_path / "file").write_bytes(b"content")
    FileSum.once_a_machine(path)
    times = path.stat()
    path.write_bytes(b"changed")
    os.utime(
        path, ns=(times.st_atime_ns, times.st_mtime_ns)
    )  # the time of its last write can be set, that of changes not
    assert FileSum.once_a_machine(path) == FileSum(7, crc32c_of(b"changed")) and len(read) == 2


def test_a_start_of_the_machine_and_a_damaged_note_lead_to_another_read(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "file").write_bytes(b"content")
    expected = FileSum.once_a_machine(path)
    (note,) = (tmp_path / "cache" / file_sums.SUMS_FOLDER).glob("*.json")
    note.write_bytes(note.read_bytes().replace(b"7", b"8"))
    assert FileSum.once_a_machine(path) == expected and len(read) == 2
    assert FileSum.once_a_machine(path) == expected and len(read) == 2
    monkeypatch.setattr(file_sums, "_boot_id", lambda: "another")
    assert FileSum.once_a_machine(path) == expected and len(read) == 3


def test_sums_of_the_files_asked_for_last_are_kept(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sums, "KEPT_SUMS", 2)
    paths, sums = [tmp_path / name for name in "abc"], tmp_path / "cache" / file_sums.SUMS_FOLDER
    for path in paths:
        path.write_bytes(b"content")
        for asked in (path, paths[0]):  # the first one again and again
            FileSum.once_a_machine(asked)
            for note in sums.glob("*.json"):  # a second later
                os.utime(note, ns=(0, note.stat().st_mtime_ns - 10**9))
    assert read == paths
    assert sorted(path.suffix for path in sums.iterdir()) == [".json", ".json", ".lock", ".lock"]
    FileSum.once_a_machine(paths[1])
    assert read == [*paths, paths[1]]


def test_small_files_are_read_by_each_process(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sums, "REMEMBERED_BYTES", 8)
    (path := tmp_path / "file").write_bytes(b"content")
    FileSum.once_a_machine(path)
    FileSum.once_a_machine(path)
    assert len(read) == 2 and not (tmp_path / "cache").exists()


def test_without_a_cache_folder_each_process_reads_the_file(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local data is read without any cache, as where the temporary folder is read-only."""
    (path := tmp_path / "file").write_bytes(b"content")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(path / "below"))
    sums = {FileSum.once_a_machine(path) for _ in range(2)}
    assert sums == {FileSum(7, crc32c_of(b"content"))} and len(read) == 2


def test_a_file_is_summed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sums, "SUMMED_BYTES", 4)
    pieces = (b"", b"a piece", bytes(9), b"x")
    with SummedFile(tmp_path / "file") as file:
        for piece in pieces:
            assert file.write(memoryview(piece)) == len(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert file.sum == FileSum.of(tmp_path / "file")
