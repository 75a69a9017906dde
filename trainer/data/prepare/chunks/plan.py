"""Plans where a source is split into chunks, and what each chunk's files depend on.

The cuts are decided by the records' own ids (content-defined chunking, as in Xia et al., "FastCDC", 2016), so records
that come between others, or are taken out, change the chunks around them and no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.prepare.deduplicate import Met
from trainer.data.prepare.thread_map import map_in_order
from trainer.data.prepare.validate_sample import Entry, image_bytes, with_unique_ids
from trainer.data.rejects import Reject, RejectedError
from trainer.data.sample import ImageRef, Sample, stable_digest

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
    repeats: tuple[str, ...] = ()  # contents that a chunk before has and data.duplicates drop leaves out of this one

    def fingerprint(self, settings: str) -> str:
        """Name of the chunk's files, 32 hexadecimal digits; `settings` stands for all else that decides their bytes."""
        return stable_digest(settings, self.content, self.records, self.repeats)[:32]

    def without(self, contents: Iterable[str]) -> Chunk:
        """The chunk that leaves these out, which come in chunks before it."""
        return replace(self, repeats=tuple(sorted(contents)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Chunk:
        values = json.loads(text)
        met = {int(place): how for place, how in values["met"].items()}
        return cls(**values | {"met": met, "repeats": tuple(values["repeats"])})


def ends_chunk(identity: str, records: int, chunk_samples: int) -> bool:
    """Whether a chunk that has `records` records ends behind the one with this id (empty: it has none).

    From half of `chunk_samples` on, one id in half of `chunk_samples` ends it: nearly `chunk_samples` on average.
    """
    if records >= LARGEST * chunk_samples:
        return True
    if records < SMALLEST * chunk_samples or not identity:
        return False
    return int(stable_digest("chunk", identity)[:16], 16) / 2**64 < 1 / (SMALLEST * chunk_samples)


def records_of_one_chunk(source: Iterable[object], chunk_samples: int) -> int | None:
    """How many records there are; None when they are enough for a cut, and it has to be looked for."""
    records = sum(1 for _ in islice(source, int(SMALLEST * chunk_samples) + 1))
    return records if records <= SMALLEST * chunk_samples else None


def write_plan(
    source: Iterable[Sample | Reject],
    folder: Path,
    *,
    validation_fraction: float,
    chunk_samples: int,
    threads: int,
    max_image_bytes: int,
) -> Iterator[int]:
    """Read the source once, write `chunks.jsonl` and `where.parquet`; yields how many records were read so far."""
    entries = with_unique_ids(source, validation_fraction)
    records = map_in_order(
        lambda entry: (*entry, _digest(entry[0])),
        entries,
        threads,
        weigh=lambda entry: image_bytes(entry[0]),
        max_bytes=threads * max_image_bytes,
    )
    with (folder / CHUNKS).open("w") as chunks, pq.ParquetWriter(folder / WHERE, WHERE_SCHEMA) as places:
        number = start = 0
        where: list[str] = []
        met: dict[int, Met] = {}
        content = hashlib.sha256()

        def end() -> None:
            chunks.write(Chunk(number, start, len(where), content.hexdigest(), met).to_json() + "\n")
            places.write_table(pa.table({"where": where}, WHERE_SCHEMA), row_group_size=len(where))

        for read, (entry, how, digest) in enumerate(records, 1):
            if how != "new":
                met[len(where)] = how
            where.append(_printable(entry.where if isinstance(entry, Reject) else entry.sample.where))
            content.update(bytes.fromhex(digest))
            identity = "" if isinstance(entry, Reject) else entry.sample.id
            if ends_chunk(identity, len(where), chunk_samples):
                end()
                number, start = number + 1, read
                where, met, content = [], {}, hashlib.sha256()
            yield read
        if where:
            end()


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


def _digest(entry: Entry | Reject) -> str:
    """Changes with everything that decides what becomes of a record, but not with its place in the source."""
    if isinstance(entry, Reject):
        shown = entry.image and _content(entry.image)
        return stable_digest("reject", entry.id, entry.code, entry.message, shown)
    sample = entry.sample
    # Of a name only the ending matters: the rest may say where in the source the image lies.
    images = [(image.name.rpartition(".")[2].lower(), _content(image)) for image in sample.images]
    turns = [(turn.question, turn.answer, turn.slice) for turn in sample.turns]
    return stable_digest(sample.id, entry.split, entry.repairs, turns, images)


def _content(image: ImageRef) -> str:
    try:
        return image.content()
    except RejectedError as error:  # what is wrong will be found again, and counted, when the chunk is prepared
        return f"{error.code} {error}"


def _printable(where: str) -> str:
    """A file's name may hold half a character, which no file of ours takes."""
    return where.encode("utf-8", "replace").decode()
