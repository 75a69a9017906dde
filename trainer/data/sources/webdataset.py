"""WebDataset tars: neighbouring members that share a key are one sample, its text in json or txt.

A key is the member's name up to the first dot of its last part. Members are never written to disk: an image is read
from its place in the tar when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.sample import IMAGE_SUFFIXES, ImageRef, Sample
from trainer.data.sources.file_patterns import Files
from trainer.data.sources.image_files import require_size
from trainer.data.sources.json_stream import BadJsonError, parse_json
from trainer.data.sources.parts import ManyParts, Part, Records
from trainer.data.sources.records import SHAPES, group_named, identity_of, split_named, turns_of
from trainer.data.sources.tar_reader import DamagedTarError, Member, members, read_member
from trainer.errors import DataError

TEXT_SUFFIXES = (".json", ".txt")
LONGEST_TEXT_BYTES = 64 << 20
MOST_MEMBERS = 1000  # of one sample


class WebDatasetSource(ManyParts):
    """Samples of one or many tars, in the order of their names."""

    def __init__(self, files: Files, caption_question: str, split_by: str, max_image_bytes: int) -> None:
        self._files, self._caption_question, self._split_by = files, caption_question, split_by
        self._max_image_bytes = max_image_bytes

    def fingerprint(self) -> str:
        """Covers name, size and checksum (in a folder: time of change) of every tar."""
        return f"webdataset {self._files.fingerprint()}"

    def parts(self) -> Sequence[Records]:
        return [Part(partial(self._samples, name)) for name in self._files.names]

    def _samples(self, tar: str) -> Iterator[Sample | Reject]:
        count = 0
        try:
            with self._files.opened(tar) as path:
                for key, group in groupby(members(path), key=lambda member: _key(member.name)):
                    where = f"{tar} {key}"
                    try:
                        yield self._sample(key, _parts(group), where, path, tar)
                    except RejectedError as error:
                        yield Reject(where, key, error.code, str(error))
                    count += 1
        except DamagedTarError as error:
            raise DataError(
                f"{self._files.storage.uri(tar)} is damaged: {error}; {count} samples come before",
                expected="a whole, uncompressed tar: nobody can say how many samples are lost behind the damage",
                fix="fetch or write the file again, or leave it out of data.source",
            ) from error

    def _sample(self, key: str, parts: list[Member], where: str, path: Path, tar: str) -> Sample:
        record = _record(parts, path)
        pictures = [part for part in parts if PurePosixPath(part.name).suffix.lower() in IMAGE_SUFFIXES]
        images = tuple(
            ImageRef(
                f"{tar}/{part.offset}/{part.name}",
                partial(self._read, tar, part),
                size_bytes=partial(getattr, part, "size_bytes"),
            )
            for part in pictures
        )
        turns = turns_of(record, len(images), self._caption_question)
        group = group_named(record, self._split_by)
        return Sample(identity_of(record, key), turns, images, where, split_named(record), group)

    def _read(self, tar: str, member: Member) -> bytes:
        require_size(member.size_bytes, self._max_image_bytes)
        with self._files.opened(tar) as path:
            return read_member(path, member)


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _parts(group: Iterator[Member]) -> list[Member]:
    """The members of one sample, once they are found safe: plain files, named inside the archive, each name once."""
    parts: list[Member] = []
    problem: RejectedError | None = None
    for member in group:  # to the end, also behind a problem: what follows belongs to this sample
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
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        return RejectedError(RejectCode.TAR_UNSAFE_MEMBER, f"{name!r} is not a name inside the archive")
    if len(before) == MOST_MEMBERS:
        return RejectedError(RejectCode.TAR_INCOMPLETE, f"more than {MOST_MEMBERS} members share this key")
    if any(name == part.name for part in before):
        return RejectedError(RejectCode.TAR_INCOMPLETE, f"the member {name!r} comes twice")
    suffix = PurePosixPath(name).suffix
    if suffix in TEXT_SUFFIXES and any(PurePosixPath(part.name).suffix == suffix for part in before):
        message = f"two {suffix} members share this key: the part of a name behind its first dot is no part of the key"
        return RejectedError(RejectCode.TAR_INCOMPLETE, message)
    return None


def _record(parts: list[Member], path: Path) -> dict[str, Any]:
    """What json says, with txt as the caption where json says nothing of the kind."""
    texts = {PurePosixPath(part.name).suffix: part for part in parts}
    record: dict[str, Any] = {}
    if ".json" in texts:
        try:
            found = parse_json(_text(texts[".json"], path))
        except BadJsonError as error:
            raise RejectedError(RejectCode.RECORD_PARSE, f"not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RejectedError(RejectCode.RECORD_FORM, f"json holds a {type(found).__name__}, not an object")
        record = found
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
