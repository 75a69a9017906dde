"""Merges prepared chunks into one data set, in the order of the source.

Shards are reused and only renumbered. What grows with the data is kept on disk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.malloc_trim import trim_memory
from vlmpipe.trainer.data.near_duplicates import table as signatures
from vlmpipe.trainer.data.prepare.chunks.chunk import ANSWERS, ANSWERS_SCHEMA, SUMMARY, write_json
from vlmpipe.trainer.data.prepare.previews import ContactSheet, write_reject_images
from vlmpipe.trainer.data.prepare.statistics import Counts, describe, near_duplicates
from vlmpipe.trainer.data.prepare.validation.deduplicate import AnswerRow
from vlmpipe.trainer.data.rejects import IN_THE_RUN, REJECTS, Ledger, Reject, RejectCode
from vlmpipe.trainer.data.rejects import SUMMARY as REJECTS_SUMMARY
from vlmpipe.trainer.data.sample import SPLITS, ImageRef, Split
from vlmpipe.trainer.data.shards.index_lines import LINES
from vlmpipe.trainer.data.shards.sorted_lines import SortedLines
from vlmpipe.trainer.data.shards.tar import FOLDER as SHARDS_FOLDER
from vlmpipe.trainer.data.shards.tar import Sidecar, shard_name, sidecar_name, write_sidecar
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.transfer import in_parallel

STATS = "stats.json"
READS = 8  # sidecars at a time
IMAGES, WITHOUT_IMAGES = "images", "samples_without_images"  # counts of accepted samples


@dataclass(frozen=True)
class Part:
    """A chunk: its fingerprint, its files, and the place in the source, for people, of each record."""

    name: str
    files: Storage
    where: Sequence[str]


@dataclass(frozen=True)
class Shard:
    """A shard, by its name in the chunk and in the whole."""

    chunk: str
    name: str
    new_name: str
    bytes: int
    crc32c: int


def merge(
    parts: Iterable[Part],
    folder: Path,
    config: DataConfig,
    coverage: Mapping[str, object] = MappingProxyType({}),
    *,
    listed: str = IN_THE_RUN,
) -> tuple[dict[str, int], list[Shard]]:
    """Write everything but the shards, the tokenizer and DONE into `folder`. Returns the counts and the shards.

    Args:
        coverage: of the sources' keys.
        listed: where people find the rejects of a failed preparation.

    Raises DataError when too many samples were rejected or a split is empty.
    """
    lines, counts, sheet = SortedLines(), Counts(), ContactSheet()
    shards: list[Shard] = []
    first: Counter[Split] = Counter()  # number of each split's first shard in the next chunk
    (folder / SHARDS_FOLDER).mkdir()
    with (
        (folder / REJECTS).open("w", encoding="utf-8") as rejects,
        pq.ParquetWriter(folder / signatures.NAME, signatures.SCHEMA) as looks,
    ):
        ledger = Ledger(config.max_reject_fraction, rejects)
        for part in parts:
            summary = json.loads(part.files.read(SUMMARY))
            assert summary["read"] == len(part.where), "a chunk's records differ from the plan"
            _add_rejects(part, summary, ledger)
            ledger.add_accepted(summary["accepted"], summary["repaired"], summary["repairs"])
            assert ledger.rejected + ledger.accepted == ledger.read
            starts = {split: first[split] for split in SPLITS}
            shards += _add_shards(part, _shard_names(summary["shards"], starts), folder)
            read = partial(_lines_of, part.files, summary["shards"], starts)
            table = read()
            lines.add(table, read)
            counts.add(table)
            counts.answers.add_counted(_answers_of(part.files))
            looks.write_table(pq.read_table(part.files.fetch(signatures.NAME)))
            counts.dropped += summary["dropped"]
            sheet.add_sheet(part.files)
            first.update(summary["shards"])
            trim_memory()
    thumbnails = write_reject_images(ledger.examples, folder, config.max_image_pixels)
    whole = ledger.summary() | {"pictures": thumbnails}
    write_json(folder / REJECTS_SUMMARY, whole)
    ledger.check(listed)
    lines.write_index(
        folder, {split: [shard_name(split, number) for number in range(first[split])] for split in SPLITS}
    )
    sheet.write(folder)
    stats = describe(folder, counts, config)
    split_samples = {split: int(stats["splits"][split]["samples"]) for split in SPLITS}
    _check_splits(split_samples, config)
    for name, of_splits in stats.get("sources", {}).items():
        if not of_splits["train"]["samples"]:
            raise no_training_samples(name)
    near = near_duplicates(folder / signatures.NAME, stats["splits"]["eval"]["unique_images"])
    write_json(folder / STATS, stats | {"near_duplicates": near, "coverage": dict(coverage)})
    seen = {
        IMAGES: sum(split["images"] for split in stats["splits"].values()),
        WITHOUT_IMAGES: sum(sum(split["images_per_sample"][:1]) for split in stats["splits"].values()),
    }
    return {name: whole[name] for name in ("read", "accepted", "rejected", "repaired")} | split_samples | seen, shards


def _add_rejects(part: Part, summary: dict[str, Any], ledger: Ledger) -> None:
    """Add the chunk's rejects, with their places in the source and the images of the first ones of each code."""
    met: Counter[str] = Counter()
    with part.files.fetch(REJECTS).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            code = RejectCode(line["code"])
            names = summary["pictures"][code]
            name = names[met[code]] if met[code] < len(names) else ""
            thumbnail = ImageRef(name, partial(part.files.read, name)) if name else None
            ledger.read += 1
            ledger.reject(Reject(part.where[int(line["where"])], line["id"], code, line["message"], thumbnail))
            met[code] += 1
    assert met.total() == summary["rejected"], "a chunk's rejects differ from its count"


def _add_shards(part: Part, new_names: Mapping[str, str], folder: Path) -> Iterator[Shard]:
    """Write the sidecars of a chunk's shards under their names in the whole."""
    contents = in_parallel(lambda name: part.files.read(sidecar_name(name)), new_names, threads=READS)
    for (name, new_name), content in zip(new_names.items(), contents, strict=True):
        sidecar = Sidecar(**json.loads(content))
        write_sidecar(folder, replace(sidecar, shard=new_name))
        yield Shard(part.name, name, new_name, sidecar.bytes, sidecar.crc32c)


def _shard_names(shards: Mapping[Split, int], starts: Mapping[Split, int]) -> dict[str, str]:
    """A chunk's shards by name, with their names in the whole. starts: the number of each split's first one there."""
    return {
        shard_name(split, number): shard_name(split, starts[split] + number)
        for split, count in shards.items()
        for number in range(count)
    }


def _lines_of(files: Storage, shards: Mapping[Split, int], starts: Mapping[Split, int]) -> pa.Table:
    """A chunk's lines of the index, with the names that its shards have in the whole."""
    table = pq.read_table(files.fetch(LINES))
    names, new_names = table.column("shard").combine_chunks().dictionary_encode(), _shard_names(shards, starts)
    renamed = pa.array([new_names[name] for name in names.dictionary.to_pylist()], pa.string())
    place = table.schema.get_field_index("shard")
    return table.set_column(place, "shard", renamed.take(names.indices))


def _answers_of(files: Storage) -> Iterator[AnswerRow]:
    columns = pq.read_table(files.fetch(ANSWERS), schema=ANSWERS_SCHEMA).columns
    return zip(*(column.to_pylist() for column in columns), strict=True)


def no_training_samples(source: str) -> DataError:
    """A source that nothing can be drawn from."""
    return DataError(
        f"data.sources: {source} has no samples for training",
        expected="at least one of each source",
        fix="leave it out, use more of its samples, another data.validation_fraction, or data.split_by: record",
    )


def _check_splits(samples: dict[Split, int], config: DataConfig) -> None:
    """Raise DataError when a split is empty, unless `data.validation_fraction` is 0."""
    train, validation = samples["train"], samples["eval"]
    if train and (validation or not config.validation_fraction):
        return
    raise DataError(
        f"{train} samples for training and {validation} held out for evaluation, split by {config.split_by}",
        expected="at least one of each: samples that share an image, directly or through others, are never separated "
        "by data.split_by: image, and files are held out whose names say so",
        fix="use more samples (data.max_samples), another data.validation_fraction, data.split_by: record, or "
        "data.file_splits: ignored",
    )
