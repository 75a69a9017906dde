"""Plans the chunks of a source.

Chunks end at certain record ids (content-defined chunking, as in Xia et al., "FastCDC", 2016), so that inserted or
removed records change only the chunks around them.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import Exclusions
from vlmpipe.trainer.data.prepare.chunks.witness import content_now, digest_of
from vlmpipe.trainer.data.prepare.split_groups import SampleGroups, group_of
from vlmpipe.trainer.data.prepare.validation.deduplicate import NEW, Met
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry, final_entry, with_met_ids
from vlmpipe.trainer.data.prepare.validation.validate_sample import image_bytes, is_short
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample, Split, stable_digest
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.transfer import in_parallel

CHUNKS = "chunks.jsonl"
PARTS = "parts.json"  # number of the first record of each of the source's parts
WHERE = "where.parquet"  # one row group a chunk
WHERE_SCHEMA = pa.schema([("where", pa.string())])
LARGEST = 2  # times data.chunk_samples
SMALLEST = 0.5
RECORDS_AHEAD = 4  # records in memory for each thread
NONE_EXCLUDED = Exclusions()


@dataclass(frozen=True)
class Chunk:
    """Records `start` to `start + records` of the source."""

    number: int
    start: int
    records: int
    content: str  # changes with its records and their images
    met: dict[int, Met] = field(default_factory=dict)  # of ids used before, by place in the chunk
    held_out: tuple[int, ...] = ()  # places in the chunk of the samples for evaluation
    repeats: tuple[str, ...] = ()  # contents of earlier chunks, left out of this one (data.duplicates: drop)

    def fingerprint(self, settings: str) -> str:
        """Name of the chunk's files, 32 hexadecimal digits; `settings` covers all else that decides their bytes."""
        return stable_digest(settings, self.content, self.records, self.repeats)[:32]

    def without(self, contents: Iterable[str]) -> Chunk:
        """The chunk without these contents, which earlier chunks have."""
        return replace(self, repeats=tuple(sorted(contents)))

    def splits(self) -> Iterator[Split]:
        """The split of each record; meaningless for a reject."""
        validation = frozenset(self.held_out)
        return ("eval" if place in validation else "train" for place in range(self.records))

    def entries(
        self, records: Iterator[Sample | Reject], source: str, excluded: Exclusions = NONE_EXCLUDED
    ) -> Iterator[Entry | Reject]:
        """The chunk's records, taken from the front of `records`, with their final ids and splits.

        Raises DataError, which names `source`, when there are too few.
        """
        for place, split in enumerate(self.splits()):
            record = next(records, None)
            if record is None:
                raise DataError(
                    f"{source} ended at record {self.start + place} of {self.start + self.records}",
                    expected="a source that does not change while it is prepared",
                    fix="run again, which reads it from the start",
                )
            yield final_entry(record, self.met.get(place, NEW), split, excluded.ids)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Chunk:
        values = json.loads(text)
        met = {int(place): how for place, how in values["met"].items()}
        return cls(**values | {"met": met} | {name: tuple(values[name]) for name in ("held_out", "repeats")})


def ends_chunk(identity: str, records: int, chunk_samples: int) -> bool:
    """Return whether a chunk of `records` records ends with the one of this id ("" for a reject).

    From half of `chunk_samples` on, one id in `chunk_samples` / 2 ends it: about `chunk_samples` on average.
    """
    if records >= LARGEST * chunk_samples:
        return True
    if records < SMALLEST * chunk_samples or not identity:
        return False
    return int(stable_digest("chunk", identity)[:16], 16) / 2**64 < 1 / (SMALLEST * chunk_samples)


def write_plan(
    source: Iterable[Sample | Reject],
    folder: Path,
    config: DataConfig,
    *,
    threads: int,
    borders: Callable[[], Collection[int]] = tuple,
    notes: list[str] | None = None,
    excluded: Exclusions = NONE_EXCLUDED,
) -> Iterator[int]:
    """Read the source once, write `chunks.jsonl` and `where.parquet`; yields the number of records read so far.

    Groups of samples are complete only at the end of the source, so digests and groups wait on disk until then.
    `borders`, known by then: numbers of records with which a chunk begins in any case. What is decided about them all
    is appended to `notes`. Raises DataError where the share held out is not `data.validation_fraction`, or where no
    sample is left of those that are not `excluded`.
    """
    # `split` where the source names it; otherwise `member`, any member of the sample's group.
    table = disk_table(
        "CREATE TABLE records (place TEXT, met TEXT, identity TEXT, digest BLOB, split TEXT, member TEXT)"
    )
    groups = SampleGroups(config)
    records = in_parallel(
        lambda record: _look_at(*record, config.split_by, excluded),
        with_met_ids(source),
        threads=threads,
        ahead=RECORDS_AHEAD,
        weigh=lambda record: image_bytes(record[0]),
        max_bytes=threads * config.max_image_bytes,
        is_short=lambda record: is_short(record[0]),
    )
    left_out = set[str]()
    for read, (line, group, identity) in enumerate(records, 1):
        left_out |= {identity} if identity else set()
        groups.add(read, group)
        table.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", (*line, group[0] if group else None))
        yield read
    _require_samples(table, excluded, frozenset(left_out))
    with (
        (folder / CHUNKS).open("w", encoding="utf-8") as chunks,
        pq.ParquetWriter(folder / WHERE, WHERE_SCHEMA) as places,
    ):
        draft, begins = _Draft(0, 0), borders()
        groups.join()
        if notes is not None:
            notes += [*groups.notes(_places_in(table)), *filter(None, [excluded.note(frozenset(left_out))])]
        for place, met, identity, digest, named, member in table.execute("SELECT * FROM records ORDER BY rowid"):
            split = named or groups.split_of(draft.start + len(draft.where) + 1, member)
            draft.add(place, met, digest, split)
            following = draft.start + len(draft.where)
            if following in begins or ends_chunk(identity, len(draft.where), config.chunk_samples):
                draft.write(chunks, places)
                draft = _Draft(draft.number + 1, following)
        if draft.where or not draft.number:
            draft.write(chunks, places)
    groups.check(_places_in(table), lambda record: _of_record(table, "member", record))


def _places_in(table: sqlite3.Connection) -> Callable[[int], str]:
    """The place in the source, for people, of a record by its number from 1."""
    return lambda record: _of_record(table, "place", record)


def _of_record(table: sqlite3.Connection, column: str, record: int) -> str:
    return str(table.execute(f"SELECT {column} FROM records WHERE rowid = ?", (record,)).fetchone()[0])


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
        if met != NEW:
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


class StoredChunks:
    """Chunks, each a line of a file, which is read when the chunk is needed: it lists what grows with the records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as lines:
            self._starts = np.cumsum([0, *map(len, lines)])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Chunk:
        with self._path.open("rb") as lines:
            lines.seek(self._starts[range(len(self))[number]])
            return Chunk.from_json(lines.readline().decode())

    def __iter__(self) -> Iterator[Chunk]:
        with self._path.open(encoding="utf-8") as lines:
            yield from map(Chunk.from_json, lines)


def read_plan(folder: Path) -> StoredChunks:
    return StoredChunks(folder / CHUNKS)


def planned_samples(
    source: Iterable[Sample | Reject], folder: Path, excluded: Collection[str]
) -> Iterator[tuple[Sample, Split]]:
    """The samples of a planned source with their splits, but for those that `data.exclude` names, by their final ids.

    Rejects are passed over, and so is what the source has beyond its plan.
    """
    records = iter(source)
    for chunk in read_plan(folder):
        for (place, split), record in zip(enumerate(chunk.splits()), records, strict=False):
            entry = final_entry(record, chunk.met.get(place, NEW), split, excluded)
            is_excluded = isinstance(entry, Reject) and entry.code == RejectCode.SAMPLE_EXCLUDED
            if isinstance(record, Sample) and not is_excluded:
                yield record, split


class Places:
    """The place in the source, for people, of each chunk's records."""

    def __init__(self, folder: Path) -> None:
        self._file = pq.ParquetFile(folder / WHERE)

    def of(self, chunk: Chunk) -> Sequence[str]:
        places: list[str] = self._file.read_row_group(chunk.number).column("where").to_pylist()
        return places


Line = tuple[str, Met, str, bytes, Split | None]  # place, whether the id was met, id ("" for a reject), digest, split


def _require_samples(table: sqlite3.Connection, excluded: Exclusions, left_out: frozenset[str]) -> None:
    """Raise DataError where samples were left out and none is left."""
    if left_out and not table.execute("SELECT 1 FROM records WHERE identity != '' LIMIT 1").fetchone():
        raise DataError(
            f"data.exclude {excluded.address!r} leaves out all {len(left_out):,} samples",
            expected="a list that leaves samples for training",
            fix="shorten the list, or leave data.exclude out",
        )


def _look_at(
    record: Sample | Reject, met: Met, split_by: str, excluded: Exclusions
) -> tuple[Line, tuple[str, ...], str]:
    """A record's line in the plan; its group, which is empty where the source names the split; and its id where that is
    excluded, else "".
    """
    entry = final_entry(record, met, "train", excluded.ids)
    if isinstance(entry, Reject):
        identity = entry.id if entry.code == RejectCode.SAMPLE_EXCLUDED else ""
        return (_printable(entry.where), met, "", digest_of(entry, content_now), "train"), (), identity
    sample = entry.sample
    contents = [content_now(image) for image in sample.images]
    of_image = {id(image): content for image, content in zip(sample.images, contents, strict=True)}
    digest = digest_of(entry, lambda image: of_image[id(image)])
    # By the original id: samples that share an id are usually about one image and must stay together.
    assert isinstance(record, Sample)
    group = () if record.split else group_of(record, contents, split_by)
    return (_printable(sample.where), met, sample.id, digest, sample.split), group, ""


def _printable(where: str) -> str:
    """Replace the lone surrogates that a file's name may contain."""
    return where.encode("utf-8", "replace").decode()
