"""Plans where a source is split into chunks, and what each chunk's files depend on.

The cuts are decided by the records' own ids (content-defined chunking, as in Xia et al., "FastCDC", 2016), so records
that come between others, or are taken out, change the chunks around them and no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.prepare.deduplicate import Met
from trainer.data.prepare.split_groups import ImageGroups, group_of
from trainer.data.prepare.thread_map import map_in_order
from trainer.data.prepare.validate_sample import Entry, final_entry, image_bytes, with_met_ids
from trainer.data.rejects import Reject, RejectedError
from trainer.data.sample import ImageRef, Sample, Split, split_of, stable_digest
from trainer.data.sqlite_table import disk_table
from trainer.errors import DataError

CHUNKS = "chunks.jsonl"
WHERE = "where.parquet"  # one row group a chunk
WHERE_SCHEMA = pa.schema([("where", pa.string())])
LARGEST = 2  # times data.chunk_samples
SMALLEST = 0.5


@dataclass(frozen=True)
class Chunk:
    """Records `start` to `start + records` of the source."""

    number: int
    start: int
    records: int
    content: str  # changes with its records and their images
    met: dict[int, Met] = field(default_factory=dict)  # by place in the chunk, of the ids that were used before
    held_out: tuple[int, ...] = ()  # places in the chunk of the samples for evaluation
    repeats: tuple[str, ...] = ()  # contents that a chunk before has and data.duplicates drop leaves out of this one

    def fingerprint(self, settings: str) -> str:
        """Name of the chunk's files, 32 hexadecimal digits; `settings` stands for all else that decides their bytes."""
        return stable_digest(settings, self.content, self.records, self.repeats)[:32]

    def without(self, contents: Iterable[str]) -> Chunk:
        """The chunk that leaves these out, which come in chunks before it."""
        return replace(self, repeats=tuple(sorted(contents)))

    def splits(self) -> Iterator[Split]:
        """The split of each record; of a reject it means nothing."""
        held_out = frozenset(self.held_out)
        return ("eval" if place in held_out else "train" for place in range(self.records))

    def entries(self, records: Iterator[Sample | Reject], source: str) -> Iterator[Entry | Reject]:
        """The chunk's records with their final ids and splits. Takes no more of `records`, which begin with them.

        Raises DataError when there are too few; `source`, for its message, is `data.source`.
        """
        for place, split in enumerate(self.splits()):
            record = next(records, None)
            if record is None:
                raise DataError(
                    f"data.source {source!r} ended at record {self.start + place} of {self.start + self.records}",
                    expected="a source that does not change while it is prepared",
                    fix="run again: what is prepared then is what is there then",
                )
            yield final_entry(record, self.met.get(place, "new"), split)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Chunk:
        values = json.loads(text)
        met = {int(place): how for place, how in values["met"].items()}
        return cls(**values | {"met": met} | {name: tuple(values[name]) for name in ("held_out", "repeats")})


def ends_chunk(identity: str, records: int, chunk_samples: int) -> bool:
    """Whether a chunk that has `records` records ends behind the one with this id (empty: it has none).

    From half of `chunk_samples` on, one id in half of `chunk_samples` ends it: nearly `chunk_samples` on average.
    """
    if records >= LARGEST * chunk_samples:
        return True
    if records < SMALLEST * chunk_samples or not identity:
        return False
    return int(stable_digest("chunk", identity)[:16], 16) / 2**64 < 1 / (SMALLEST * chunk_samples)


def is_one_chunk(records: int, chunk_samples: int) -> bool:
    """Whether a source of so many records is never cut."""
    return records <= SMALLEST * chunk_samples


def write_plan(
    source: Iterable[Sample | Reject],
    folder: Path,
    *,
    split_by: str,
    validation_fraction: float,
    chunk_samples: int,
    threads: int,
    max_image_bytes: int,
) -> Iterator[int]:
    """Read the source once, write `chunks.jsonl` and `where.parquet`; yields how many records were read so far.

    Which samples belong together is known at the end of the source only, so what decides the chunks waits on disk.
    """
    # A split is there where the source names it, a member of the sample's group where the group decides.
    table = disk_table(
        "CREATE TABLE records (place TEXT, met TEXT, identity TEXT, digest BLOB, split TEXT, member TEXT)"
    )
    groups = ImageGroups()
    records = map_in_order(
        lambda record: _look_at(*record, split_by),
        with_met_ids(source),
        threads,
        weigh=lambda record: image_bytes(record[0]),
        max_bytes=threads * max_image_bytes,
    )
    for read, (line, group) in enumerate(records, 1):
        if len(group) > 1:
            groups.join(group)
        table.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", (*line, group[0] if group else None))
        yield read
    with (folder / CHUNKS).open("w") as chunks, pq.ParquetWriter(folder / WHERE, WHERE_SCHEMA) as places:
        draft = _Draft(0, 0)
        for place, met, identity, digest, named, member in table.execute("SELECT * FROM records ORDER BY rowid"):
            split = named or split_of(groups.root(member), validation_fraction)
            draft.add(place, met, digest, split)
            if ends_chunk(identity, len(draft.where), chunk_samples):
                draft.write(chunks, places)
                draft = _Draft(draft.number + 1, draft.start + len(draft.where))
        if draft.where or not draft.number:
            draft.write(chunks, places)


@dataclass
class _Draft:
    """A chunk whose end is not known yet."""

    number: int
    start: int
    where: list[str] = field(default_factory=list)
    met: dict[int, Met] = field(default_factory=dict)
    held_out: list[int] = field(default_factory=list)
    content: Any = field(default_factory=hashlib.sha256)

    def add(self, where: str, met: Met, digest: bytes, split: Split) -> None:
        place = len(self.where)
        if met != "new":
            self.met[place] = met
        if split == "eval":
            self.held_out.append(place)
        self.where.append(where)
        self.content.update(digest + split.encode())

    def write(self, chunks: TextIO, places: pq.ParquetWriter) -> None:
        content = self.content.hexdigest()
        chunk = Chunk(self.number, self.start, len(self.where), content, self.met, tuple(self.held_out))
        chunks.write(chunk.to_json() + "\n")
        places.write_table(pa.table({"where": self.where}, WHERE_SCHEMA), row_group_size=max(1, len(self.where)))


def read_plan(folder: Path) -> Iterator[Chunk]:
    with (folder / CHUNKS).open() as lines:
        yield from map(Chunk.from_json, lines)


class Places:
    """Where the records of each chunk lie in the source, for people."""

    def __init__(self, folder: Path) -> None:
        self._file = pq.ParquetFile(folder / WHERE)

    def of(self, chunk: Chunk) -> Sequence[str]:
        places: list[str] = self._file.read_row_group(chunk.number).column("where").to_pylist()
        return places


Line = tuple[str, Met, str, bytes, Split | None]  # where it is, id met before, id (of a reject none), digest, own split


def _look_at(record: Sample | Reject, met: Met, split_by: str) -> tuple[Line, tuple[str, ...]]:
    """What the plan needs of a record, and its group; the group is empty where the source names the split.

    The digest changes with all that decides what becomes of a record but its split, and not with its place in the
    source.
    """
    entry = final_entry(record, met, "train")
    if isinstance(entry, Reject):
        shown = entry.image and _content(entry.image)
        digest = stable_digest("reject", entry.id, entry.code, entry.message, shown)
        return (_printable(entry.where), met, "", bytes.fromhex(digest), "train"), ()
    sample = entry.sample
    contents = [_content(image) for image in sample.images]
    # Of a name only the ending matters: the rest may say where in the source the image lies.
    suffixes = [image.name.rpartition(".")[2].lower() for image in sample.images]
    images = list(zip(suffixes, contents, strict=True))
    turns = [(turn.question, turn.answer, turn.slice) for turn in sample.turns]
    digest = stable_digest(sample.id, entry.repairs, turns, images)
    # By the id before a suffix, so that samples that share an id, as a rule about one picture, stay together.
    assert isinstance(record, Sample)
    group = () if record.split else group_of(record, contents, split_by)
    return (_printable(sample.where), met, sample.id, bytes.fromhex(digest), sample.split), group


def _content(image: ImageRef) -> str:
    try:
        return image.content()
    except RejectedError as error:  # what is wrong will be found again, and counted, when the chunk is prepared
        return f"{error.code} {error}"


def _printable(where: str) -> str:
    """A file's name may hold half a character, which no file of ours takes."""
    return where.encode("utf-8", "replace").decode()
