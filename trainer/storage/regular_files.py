"""Opens untrusted files: regular files only, of bounded size, without blocking.

Opening a FIFO waits for a writer, a device has no end, and a link may lead to either. So users' files are opened
without blocking and checked through their descriptor, which cannot be exchanged afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from vlmpipe.trainer.errors import DataError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
# First bytes of files that arrive in another's place and under its name: what each is, and what makes it the file.
STAND_INS = {
    b"version https://git-lfs.github.com/spec/": ("a pointer of Git LFS to the file", "git lfs pull in its repository"),
    b"\x1f\x8b": ("compressed by gzip", "gunzip it"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "unzstd it"),
    b"BZh": ("compressed by bzip2", "bunzip2 it"),
    b"\xfd7zXZ\x00": ("compressed by xz", "unxz it"),
    b"PK\x03\x04": ("a ZIP archive", "unzip it"),
    b"\xff\xfe": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"<!doctype html": ("a web page, such as one to sign in", "download the file itself"),
    b"<html": ("a web page, such as one to sign in", "download the file itself"),
    b"<?xml": ("an XML document, such as a store's answer to a refused request", "download the file itself"),
}
STAND_IN_BYTES = 64
CHUNK_BYTES = 1 << 16
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
LOCK = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
UNOPENABLE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a loop of links, a socket, a device without a driver


class NotRegularFileError(DataError):
    """A path leads to something other than a regular file (exit 65)."""

    def __init__(self, path: Path | str, kind: str) -> None:
        super().__init__(
            f"{path} is {kind}, not a regular file",
            expected="a regular file, or a link to one",
            fix="replace it by the file that should be there, or leave it out",
        )


class FileTooLargeError(DataError):
    """A file has more bytes than may be read into memory (exit 65)."""

    def __init__(self, path: Path | str, size_bytes: int, max_bytes: int) -> None:
        self.size_bytes, self.max_bytes = size_bytes, max_bytes
        super().__init__(f"{path} has {size_bytes:,} bytes", expected=f"at most {max_bytes:,} bytes")


def open_regular(path: Path | str) -> BinaryIO:
    """Open for reading. Raises NotRegularFileError, and OSError as `open` does."""
    return os.fdopen(_opened(path, READ)[0], "rb")


def read_whole(path: Path | str) -> bytes:
    """All bytes of a file. Raises as `open_regular`; cheaper than to open a small one as a file object."""
    handle, size_bytes = _opened(path, READ)
    try:
        data = os.read(handle, size_bytes + 1)
        if len(data) == size_bytes > 0:  # less than was asked for: the end
            return data
        pieces = [data]
        while pieces[-1]:
            pieces.append(os.read(handle, CHUNK_BYTES))
        return b"".join(pieces)
    finally:
        os.close(handle)


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """All bytes of a file of at most `max_bytes`. Raises FileTooLargeError before it reads more, else as above."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes <= max_bytes:
            # Asking for much more than there is would take memory for all of it first.
            data = file.read(size_bytes + 1)
            if len(data) > size_bytes:  # it has grown, or is one of /proc, which report size 0
                data += file.read(max_bytes + 1 - len(data))
            size_bytes = len(data)
        if size_bytes > max_bytes:
            raise FileTooLargeError(path, size_bytes, max_bytes)
    return data


def require_regular(path: Path | str) -> None:
    """Raise as `open_regular` does, for files that a library opens itself."""
    open_regular(path).close()


def require_regular_files(folder: Path) -> None:
    """Raise as `open_regular` does for each file in a folder; pass over what is no folder.

    For libraries such as transformers, which open the files that they find: a FIFO would stop them for ever.
    """
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                require_regular(path)


def stand_in_of(head: bytes) -> tuple[str, str] | None:
    """Kind of a file with these first bytes, and how to get the file that was meant; None where neither is known.

    For errors of files that could not be read as what their names say.
    """
    lowered = head.lstrip(b" \t\r\n").lower()
    return next((meaning for start, meaning in STAND_INS.items() if lowered.startswith(start.lower())), None)


def head_of(path: Path | str) -> bytes:
    """The first bytes of a file; none of one that cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(STAND_IN_BYTES)
    except (OSError, DataError):
        return b""


def open_lock(path: Path | str, mode: int = 0o600, *, create: bool = True) -> int:
    """A descriptor of a lock file. Links are not followed: their targets may be another user's."""
    return _opened(path, LOCK | (os.O_CREAT if create else 0), mode)[0]


def kind_of(path: Path | str) -> str:
    """The kind of a special file, in words; empty for regular files, folders and missing paths."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return "a loop of symbolic links" if error.errno == errno.ELOOP else ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else KINDS.get(stat.S_IFMT(mode), "a special file")


def _opened(path: Path | str, flags: int, mode: int = 0o600) -> tuple[int, int]:
    """Return the descriptor of a regular file, and the file's size in bytes."""
    try:
        handle = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in UNOPENABLE:
            raise
        raise NotRegularFileError(path, kind_of(path) or "a symbolic link") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise NotRegularFileError(path, KINDS.get(stat.S_IFMT(status.st_mode), "a special file"))
    return handle, status.st_size
