"""The base classes of sources: ordered samples that are read in independent parts; and several sources as one."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from types import MappingProxyType
from typing import Generic, TypeVar

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.grounding import require_no_marks, with_names
from vlmpipe.trainer.data.conversations.records import (
    SHAPES,
    group_named,
    require_media,
    split_named,
    turns_of,
)
from vlmpipe.trainer.data.conversations.slice_fields import fields_named
from vlmpipe.trainer.data.rejects import Reject, RejectedError
from vlmpipe.trainer.data.sample import DEFAULT_SLICE, ImageRef, Sample, Split, Turn, stable_digest
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.sources.image_files import open_image_files
from vlmpipe.trainer.data.sources.split_names import stated_splits
from vlmpipe.trainer.data.sqlite_table import disk_table

Records = Iterable[Sample | Reject]


Raw = TypeVar("Raw")
Item = TypeVar("Item")


class Source(ABC):
    """An ordered set of samples. Iterating again gives the same samples in the same order."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when any sample or image of the source changes."""

    def recall(self, earlier: Source) -> None:  # noqa: B027, most sources name no images
        """Take over which images the records name from the same source, opened before: `fingerprint` then reads files'
        metadata only, where the records' files are the same.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Sample | Reject]:
        """Samples, and a Reject in place of each record that could not be read."""

    def parts(self) -> Sequence[Records]:
        """The source in pieces, such as files, that can be read independently. Their concatenation is the source."""
        return [self]

    def first_parts(self) -> Sequence[int]:
        """Places in `parts` where chunks of prepared data must begin."""
        return [0]

    def members(self) -> Sequence[Records]:
        """Each of several sources by itself."""
        return [self]

    def notes(self) -> Sequence[str]:
        """Decisions about the source and findings while it was read, one sentence each, for people."""
        return []


class FileSource(Source, Generic[Raw, Item]):
    """Samples of one or many files. A subclass reads the records of one format.

    Raw: a record as the file has it. Item: as `sample` takes it.
    """

    format: str  # begins the fingerprint
    shapes: Sequence[str] = tuple(SHAPES)  # keys under which a record may hold its conversation
    names_images = True  # records name image files instead of holding images
    makes_ids = True  # of records without one, from what they hold
    splits: Mapping[str, Split] = MappingProxyType({})  # that names of files state
    left_out: Sequence[str] = ()  # files of the folder that are not data

    def __init__(self, files: Files, config: DataConfig) -> None:
        self.files, self.config = files, config
        self.splits = stated_splits(files.names) if config.file_splits == "stated" else {}
        folder = config.image_folder if self.names_images else ""
        self.image_files = open_image_files(config, folder, files.storage)
        self._names: sqlite3.Connection | None = None  # of images, once they were read
        self._empty: dict[str, None] = {}  # files that were read to their end and hold no sample

    @abstractmethod
    def read(self, name: str) -> Iterator[Sample | Reject]:
        """The samples of one file, each made by `checked`."""

    @abstractmethod
    def sample(self, where: str, record: Item) -> Sample:
        """The sample of a record. Raises RejectedError."""

    @abstractmethod
    def named(self, record: Raw) -> Item:
        """The record under the names of `data.columns`. Raises RejectedError."""

    def record_id(self, record: Raw) -> str:
        """The id under which a rejected record is listed."""
        return str(record.get("id", "")) if isinstance(record, dict) else ""

    def fingerprint(self) -> str:
        """Covers name, size and checksum (in a folder: modification time) of the files and of every image they name."""
        named = ""
        if self.names_images:
            named = self.image_files.fingerprint(self._image_names())
        return f"{self.format} {self.files.fingerprint()} {named}"

    def recall(self, earlier: Source) -> None:
        if isinstance(earlier, FileSource) and earlier.files.fingerprint() == self.files.fingerprint():
            self._names = earlier._names

    def _image_names(self) -> Iterator[str]:
        """Names of all images in the order of the records, which are read for that once."""
        if self._names is not None:
            yield from (name for (name,) in self._names.execute("SELECT name FROM names ORDER BY rowid"))
            return
        names = disk_table("CREATE TABLE names (name TEXT)")
        for sample in self:
            for image in sample.images if isinstance(sample, Sample) else ():
                names.execute("INSERT INTO names VALUES (?)", (image.name,))
                yield image.name
        self._names = names

    def parts(self) -> Sequence[Records]:
        return [Part(partial(self._read, name)) for name in self.files.names]

    def _read(self, name: str) -> Iterator[Sample | Reject]:
        """The samples of one file, in the split that the file's name states, if their records state none."""
        split, record = self.splits.get(name), None
        with self.files.naming_stand_ins(name):
            for record in self.read(name):
                if split and isinstance(record, Sample) and record.split is None:
                    record = replace(record, split=split)
                yield record
        if record is None:
            self._empty[name] = None

    def notes(self) -> list[str]:
        notes = list(super().notes())
        if self.splits:
            validation = sum(split == "eval" for split in self.splits.values())
            text = f"{validation} of {len(self.files.names)} files are held out for validation, as their names say"
            notes.append(f"{text} (data.file_splits)")
        if self.left_out:
            more = f" and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""
            notes.append(f"left out: {self.left_out[0]}{more}, which the saved data set does not name")
        if self._empty:
            first, *others = map(repr, self._empty)
            more = f" and {len(others)} more" if others else ""
            notes.append(f"no samples in {first}{more}")
        return notes

    def __iter__(self) -> Iterator[Sample | Reject]:
        return chain.from_iterable(self.parts())

    def build(
        self, record: Record, images: tuple[ImageRef, ...], where: str, identity: str, *, videos: int = 0
    ) -> Sample:
        """The sample of a record whose images, number of videos and id are known. Raises RejectedError."""
        turns = turns_of(record, len(images), self.config.caption_question, self.shapes)
        turns, boxes = with_names(record, turns, len(images), videos)
        split, group = split_named(record), group_named(record, self.config.split_by)
        if fields := fields_named(record, self.config.slices):
            turns = tuple(replace(turn, fields=fields) for turn in turns)
        unread = record.unread(has_media=bool(images) or bool(videos))
        require_media(record, turns, len(images), videos, unread)
        require_no_marks(turns, are_filled=bool(boxes))
        is_hash = self.makes_ids and not record.has("id")
        return Sample(identity, turns, images, where, split, group, unread, is_hash, boxes)

    def renamed(self, record: object) -> object:
        """An object under the names of `data.columns`; anything else as it is."""
        return Record.of(record, self.config.columns) if isinstance(record, dict) else record

    def checked(self, where: str, record: Raw | Reject) -> Sample | Reject:
        """The sample of a record, or a Reject with the reason. `where` names its place for people."""
        if isinstance(record, Reject):
            return record
        try:
            return self.sample(where, self.named(record))
        except RejectedError as error:
            return Reject(where, self.record_id(record), error.code, str(error))


class SeveralSources(Source):
    """Sources by name, one after the other. Names begin the ids, slices and places of their samples."""

    def __init__(self, sources: Mapping[str, Source], most: Mapping[str, int]) -> None:
        """`most`: number of first samples of each source to use; 0 is all."""
        self._sources, self._most = sources, most

    def fingerprint(self) -> str:
        return stable_digest(
            *((name, source.fingerprint(), self._most[name]) for name, source in self._sources.items())
        )

    def recall(self, earlier: Source) -> None:
        if isinstance(earlier, SeveralSources):
            for name, source in self._sources.items():
                source.recall(earlier._sources[name])

    def parts(self) -> Sequence[Records]:
        return [part for name in self._sources for part in self._parts_of(name)]

    def first_parts(self) -> Sequence[int]:
        return list(accumulate(map(len, map(self._parts_of, self._sources)), initial=0))[:-1]

    def notes(self) -> Sequence[str]:
        return [f"{name}: {note}" for name, source in self._sources.items() for note in source.notes()]

    def members(self) -> Sequence[Records]:
        return [chain.from_iterable(self._parts_of(name)) for name in self._sources]

    def __iter__(self) -> Iterator[Sample | Reject]:
        return chain.from_iterable(self.parts())

    def _parts_of(self, name: str) -> Sequence[Records]:
        source, most = self._sources[name], self._most[name]
        if most:
            return [Part(lambda: (_named(record, name) for record in islice(source, most)))]
        return [Part(partial(_all_named, part, name)) for part in source.parts()]


def _all_named(records: Records, name: str) -> Iterator[Sample | Reject]:
    return (_named(record, name) for record in records)


def _named(record: Sample | Reject, name: str) -> Sample | Reject:
    """The record as one of the source `name`."""
    where = f"{name}: {record.where}"
    identity = f"{name}/{record.id}" if record.id else ""
    if isinstance(record, Reject):
        return replace(record, where=where, id=identity)
    turns = tuple(_in_slice(turn, name) for turn in record.turns)
    further = (record.split, record.group, record.unread, record.id_is_hash, record.boxes)
    return Sample(identity, turns, record.images, where, *further)


def _in_slice(turn: Turn, name: str) -> Turn:
    # Each record is read three times or more, and dataclasses.replace takes four times as long.
    part = name if turn.slice == DEFAULT_SLICE else f"{name}/{turn.slice}"
    texts = (turn.question, turn.answer, part, turn.system, turn.thinking, turn.rejected)
    return Turn(*texts, turn.is_context, turn.region, turn.tools, turn.calls, turn.results, turn.fields)


@dataclass(frozen=True)
class Part:
    """A piece of a source, such as a file. `read` starts over each time."""

    read: Callable[[], Iterator[Sample | Reject]]

    def __iter__(self) -> Iterator[Sample | Reject]:
        return self.read()


def counted(parts: Sequence[Records], starts: list[int]) -> Iterator[Sample | Reject]:
    """All records. Appends to `starts` the number of records before each part that was begun."""
    read = 0
    for part in parts:
        starts.append(read)
        for record in part:
            read += 1
            yield record


def records_from(parts: Sequence[Records], starts: Sequence[int], record: int) -> tuple[Iterator[Sample | Reject], int]:
    """The records from the beginning of the part that holds number `record`, and the number of the first of them."""
    part = bisect_right(starts, record) - 1
    return chain.from_iterable(parts[part:]), starts[part]
