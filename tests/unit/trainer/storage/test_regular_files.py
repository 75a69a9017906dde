"""Only regular files are opened, without waiting and within a bound."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmpipe.trainer.storage.regular_files import (
    FileTooLargeError,
    NotRegularFileError,
    kind_of,
    open_lock,
    open_regular,
    read_regular,
    read_whole,
)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a path of a socket has at most 108 bytes


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": bound_socket,
    "a loop of symbolic links": lambda path: path.symlink_to(path.name),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_is_reported_without_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    SPECIAL[kind](tmp_path / "file")
    with pytest.raises(NotRegularFileError, match=f"file is {kind}, not a regular file"):
        open_regular(tmp_path / "file")
    assert kind_of(tmp_path / "file") == kind


def test_folder_is_not_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(NotRegularFileError, match="a folder"):
        open_regular(tmp_path)


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"bytes"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(FileTooLargeError, match="at most 100 bytes"):
        read_regular(tmp_path / "sparse", 100)


def test_file_without_a_true_size_is_read_up_to_the_bound() -> None:
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(FileTooLargeError):
        read_regular("/proc/self/maps", 10)
    assert read_regular("/proc/self/cmdline", 1 << 20) == Path("/proc/self/cmdline").read_bytes() != b""


def test_a_whole_file_is_read_whatever_size_it_reports(tmp_path: Path) -> None:
    for content in (b"", b"x", bytes(range(256)) * 1000):
        (tmp_path / "file").write_bytes(content)
        assert read_whole(tmp_path / "file") == content
    assert read_whole("/proc/self/limits").startswith(b"Limit"), "its size is 0"


def test_reading_takes_memory_for_the_file_and_not_for_the_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "file", 1 << 28) == b"bytes"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_lock_is_not_opened_through_a_link_and_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    os.close(open_lock(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"bytes"
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(NotRegularFileError, match="symbolic link"):
        open_lock(tmp_path / "link")
