"""Reads the members of a tar file in order, with their offsets, and validates every header.

Python's tarfile treats a damaged header, and the end of a file truncated between members, as the end of the archive,
which would silently lose samples; negative sizes make it loop forever (before 3.11.14, CVE-2025-8194). Only its decoder
of single headers is used.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vlmpipe.trainer.storage.base import CHUNK_BYTES
from vlmpipe.trainer.storage.regular_files import open_regular

BLOCK = tarfile.BLOCKSIZE
MAX_SIZE_DIGITS = 20  # of a member in pax records
LONGEST_HEADER_BYTES = 1 << 20  # of a long name or a set of pax records
# The end mark, two blocks of zeros, and what fills the last record of 20 blocks (POSIX.1-2001, ustar interchange
# format). More zeros are left by a download that did not finish, in a file that was given its whole size before.
MAX_ZEROS = tarfile.RECORDSIZE + 2 * BLOCK
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)


class DamagedTarError(Exception):
    """The archive is damaged; names the byte."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member that is not a folder. `kind` is "" for a plain file, else for example `a link`."""

    name: str
    offset: int  # of its bytes in the archive
    size_bytes: int
    kind: str


def members(path: Path) -> Iterator[Member]:
    """All members in order. Raises DamagedTarError where the archive is damaged."""
    with open_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        offset, long_name, pax = 0, b"", {}  # type: int, bytes, dict[str, str]
        while True:
            file.seek(offset)
            block = file.read(BLOCK)
            if len(block) == BLOCK and not block.strip(b"\0"):
                return _only_zeros(file, offset, end)
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                what = f"a header that cannot be read ({error})" if len(block) == BLOCK else "the end of the file"
                raise DamagedTarError(f"{what} at byte {offset}, where a member or the end mark should be") from error
            start, size = offset + BLOCK, int(pax.get("size", header.size))
            if size < 0 or start + size > end:
                raise DamagedTarError(f"the member at byte {offset} needs {size} bytes, {end - start} are left")
            offset = start + -(-size // BLOCK) * BLOCK
            if header.type in (tarfile.GNUTYPE_LONGNAME, *PAX):
                payload = _payload(file, start, size)
                if header.type in PAX:
                    pax |= _pax_records(payload, start)
                else:
                    long_name = payload.rstrip(b"\0")
                continue
            if header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK, tarfile.DIRTYPE):
                name = pax.get("path") or (long_name.decode("utf-8", "surrogateescape") if long_name else header.name)
                yield Member(name, start, size, _kind(header.type, pax))
            if header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
                long_name, pax = b"", {}


def read_member(path: Path, member: Member) -> bytes:
    """The bytes of one member. Safe to call from several threads."""
    with open_regular(path) as file:
        return os.pread(file.fileno(), member.size_bytes, member.offset)


def _kind(type_flag: bytes, pax: dict[str, str]) -> str:
    if type_flag in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        return "a link"
    if type_flag == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in pax):
        return "a sparse file"
    return "" if type_flag in REGULAR else f"of the type {type_flag!r}"


def _payload(file: BinaryIO, start: int, size: int) -> bytes:
    if size > LONGEST_HEADER_BYTES:
        raise DamagedTarError(f"the header at byte {start} has {size} bytes, more than {LONGEST_HEADER_BYTES}")
    file.seek(start)
    return file.read(size)


def _pax_records(payload: bytes, start: int) -> dict[str, str]:
    """Records "length key=value\\n" (POSIX.1-2001, pax interchange format)."""
    records, at = {}, 0
    while at < len(payload) and payload[at]:
        digits = payload[at : at + 20].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = payload[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not equals or payload[at + length - 1 : at + length] != b"\n" or (key == b"size" and not _is_size(value)):
            raise DamagedTarError(f"the extended header at byte {start} cannot be read")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records


def _is_size(value: bytes) -> bool:
    return value.isdigit() and len(value) <= MAX_SIZE_DIGITS


def _only_zeros(file: BinaryIO, offset: int, end: int) -> None:
    """Check that zeros follow the end mark, and no more than writers pad with.

    Otherwise part of the file was blanked or never arrived, or another archive follows.
    """
    file.seek(offset)
    while chunk := file.read(CHUNK_BYTES):
        if chunk.strip(b"\0"):
            raise DamagedTarError(f"an end mark at byte {offset}, but more bytes after it")
    if end - offset > MAX_ZEROS:
        raise DamagedTarError(
            f"{end - offset} zeros from byte {offset} on, where writers put at most {MAX_ZEROS}: a download that did "
            "not finish, or a tar of records of more than 20 blocks"
        )
