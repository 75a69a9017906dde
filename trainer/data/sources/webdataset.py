"""WebDataset tars: neighbouring members that share a key are one sample, its text in json or txt.

A key is the member's name up to the first dot of its last part. Images are read from the tar when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath

from vlmpipe.trainer.data.accounting.keys import MEDIA_SUFFIXES, Record
from vlmpipe.trainer.data.conversations.message_parts import kind_of
from vlmpipe.trainer.data.conversations.records import SHAPES, identity_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES, ImageRef, Sample, Unread
from vlmpipe.trainer.data.sources.base import FileSource
from vlmpipe.trainer.data.sources.image_files import require_size
from vlmpipe.trainer.data.sources.tar_reader import DamagedTarError, Member, members, read_member
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.printable import unsafe_characters

TEXT_SUFFIXES = (".json", ".txt")
READ_SUFFIXES = IMAGE_SUFFIXES.union(TEXT_SUFFIXES)
LONGEST_TEXT_BYTES = 64 << 20
MAX_MEMBERS = 1000  # of one sample


@dataclass(frozen=True)
class _Group:
    """The members of a tar that share a key."""

    key: str
    members: Iterator[Member]
    tar: str
    path: Path  # the tar on this machine


class WebDatasetSource(FileSource[_Group, _Group]):
    """Samples of one or many tars, in the order of their names."""

    names_images = makes_ids = False

    def fingerprint(self) -> str:
        """Covers name, size and checksum (in a folder: modification time) of every tar."""
        return f"webdataset {self.files.fingerprint()}"

    def read(self, name: str) -> Iterator[Sample | Reject]:
        count = 0
        try:
            with self.files.opened(name) as path:
                for key, group in groupby(members(path), key=lambda member: _key(member.name)):
                    yield self.checked(f"{name} {key}", _Group(key, group, name, path))
                    count += 1
        except DamagedTarError as error:
            raise DataError(
                f"{self.files.storage.uri(name)} is damaged: {error}; {count} samples come before",
                expected="a whole, uncompressed tar: how many samples come after the damage is unknown",
                fix="fetch or write the file again, or leave it out of data.source",
            ) from error

    def record_id(self, record: _Group) -> str:
        return record.key

    def named(self, record: _Group) -> _Group:
        return record  # which is read by `sample`

    def sample(self, where: str, record: _Group) -> Sample:
        parts = _safe_members(record.members)
        content = Record.of(_content(parts, record.path), self.config.columns)
        content.noted.update(
            Unread(f"*{suffix}", "a member of a tar" if suffix.lower() in MEDIA_SUFFIXES else "")
            for part in parts
            if (suffix := _suffix(part.name)).lower() not in READ_SUFFIXES
        )
        images = tuple(
            ImageRef(
                f"{record.tar}/{part.offset}/{part.name}",
                partial(self._read_image, record.tar, part),
                size_bytes=partial(getattr, part, "size_bytes"),
            )
            for part in parts
            if PurePosixPath(part.name).suffix.lower() in IMAGE_SUFFIXES
        )
        if not images and (named := [key for key in ("image", "images") if content.has(key)]):
            content.noted.add(Unread(named[0], "its name"))
        content.took("image", "images")  # of LLaVA's records in tars: the members are the images
        return self.build(content, images, where, identity_of(content, record.key))

    def _read_image(self, tar: str, member: Member) -> bytes:
        require_size(member.size_bytes, self.config.max_image_bytes)
        with self.files.opened(tar) as path:
            return read_member(path, member)


def _suffix(name: str) -> str:
    """The last suffix of a member's name, or all of a name without one."""
    return PurePosixPath(name).suffix or f"/{PurePosixPath(name).name}"


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _safe_members(group: Iterator[Member]) -> list[Member]:
    """The members of one sample: plain files with distinct names inside the archive. Raises RejectedError."""
    parts: list[Member] = []
    problem: RejectedError | None = None
    for member in group:  # to the end, even after a problem: the rest belongs to this sample
        if problem is None:
            problem = _problem(member, parts)
            parts.append(member)
    if problem:
        raise problem
    return parts


def _problem(member: Member, before: list[Member]) -> RejectedError | None:
    name = member.name
    if member.kind:
        return RejectedError(RejectCode.TAR_UNSAFE_MEMBER, f"{name!r} is {member.kind}, not a plain file")
    if unsafe := unsafe_characters(name):
        return RejectedError(RejectCode.TAR_UNSAFE_MEMBER, f"{name!r} has control characters or marks: {unsafe}")
    if name.startswith("/") or ".." in name.split("/"):
        return RejectedError(RejectCode.TAR_UNSAFE_MEMBER, f"{name!r} is not a name inside the archive")
    if len(before) == MAX_MEMBERS:
        return RejectedError(RejectCode.TAR_INCOMPLETE, f"more than {MAX_MEMBERS} members share this key")
    if any(name == part.name for part in before):
        return RejectedError(RejectCode.TAR_INCOMPLETE, f"the member {name!r} comes twice")
    suffix = PurePosixPath(name).suffix
    if suffix in TEXT_SUFFIXES and any(PurePosixPath(part.name).suffix == suffix for part in before):
        message = f"two {suffix} members share this key: a key ends at the first dot of a name"
        return RejectedError(RejectCode.TAR_INCOMPLETE, message)
    return None


def _content(parts: list[Member], path: Path) -> dict[str, object]:
    """The record in json; txt is its caption if json has no conversation."""
    texts = {PurePosixPath(part.name).suffix: part for part in parts}
    record: dict[str, object] = {}
    if ".json" in texts:
        try:
            content = parse_json(_text(texts[".json"], path))
        except BadJsonError as error:
            raise RejectedError(RejectCode.RECORD_PARSE, f"not JSON: {error}") from error
        if not isinstance(content, dict):
            raise RejectedError(RejectCode.RECORD_FORM, f"json holds {kind_of(content)}, not an object")
        record = content
    if ".txt" in texts and all(record.get(key) is None for key in SHAPES):
        record = record | {"caption": _text(texts[".txt"], path)}
    if not record:
        names = ", ".join(part.name for part in parts[:5])
        raise RejectedError(RejectCode.TAR_INCOMPLETE, f"no json or txt beside {names}")
    return record


def _text(member: Member, path: Path) -> str:
    if member.size_bytes > LONGEST_TEXT_BYTES:
        raise RejectedError(RejectCode.RECORD_PARSE, f"{member.name} has more than {LONGEST_TEXT_BYTES} bytes")
    try:
        return read_member(path, member).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RejectedError(RejectCode.RECORD_ENCODING, f"{member.name} is not UTF-8: {error}") from error
