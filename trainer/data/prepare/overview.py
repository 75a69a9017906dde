"""Overview of prepared data by source: lengths, images and duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.mixture import draws_of
from vlmpipe.trainer.data.shards.index_file import NAME, read_columns
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.sqlite_table import disk_table

COLUMNS = ["id", "tokens", "content", "images"]
MAX_IMAGES = 16  # samples with more share the last place
CONTENT, IMAGE = 0, 1  # kinds of digests


@dataclass
class SourceOverview:
    """Counts over one source. `lengths`, `images`: how many samples have each number of tokens, of images."""

    name: str
    lengths: NDArray[np.int64]
    images: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_IMAGES + 1, np.int64))
    train_samples: int = 0
    train_tokens: int = 0
    epoch_tokens: float = 0.0  # that the first epoch of training draws

    @property
    def samples(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        return int(self.lengths @ np.arange(len(self.lengths)))


@dataclass(frozen=True)
class Shared:
    """Distinct samples and images that two sources share; of one source with itself, that it repeats."""

    first: str
    second: str
    samples: int
    images: int


@dataclass(frozen=True)
class Overview:
    sources: tuple[SourceOverview, ...]
    shared: tuple[Shared, ...]  # without pairs that share nothing


def overview(prepared_uri: str, data: DataConfig) -> Overview:
    """Read the index, in memory that does not grow with it."""
    storage = open_prepared(prepared_uri)
    sources = [SourceOverview(source.name, np.zeros(data.sequence_length + 1, np.int64)) for source in data.all_sources]
    met = _Met()
    for split, lines in read_columns(storage.fetch(NAME), COLUMNS):
        for number, of_source in enumerate(_by_source(lines, data)):
            _count(sources[number], of_source, is_train=split == "train")
            met.add(number, of_source)
    sizes = [source.train_samples for source in sources]
    draws = draws_of(data, sizes, 0) if data.sources else sizes
    for its_source, drawn in zip(sources, draws, strict=True):
        its_source.epoch_tokens = drawn * its_source.train_tokens / max(1, its_source.train_samples)
    return Overview(tuple(sources), tuple(met.shared([source.name for source in sources])))


def _by_source(lines: pa.RecordBatch, data: DataConfig) -> Iterator[pa.RecordBatch]:
    if not data.sources:
        yield lines
    for source in data.sources:
        yield lines.filter(pc.starts_with(lines.column("id"), f"{source.name}/"))


def _count(source: SourceOverview, lines: pa.RecordBatch, *, is_train: bool) -> None:
    tokens = lines.column("tokens").to_numpy().astype(np.int64)
    images = pc.list_value_length(lines.column("images")).to_numpy(zero_copy_only=False).astype(np.int64)
    source.lengths += np.bincount(tokens, minlength=len(source.lengths))
    source.images += np.bincount(images.clip(max=MAX_IMAGES), minlength=len(source.images))
    if is_train:
        source.train_samples += len(tokens)
        source.train_tokens += int(tokens.sum())


class _Met:
    """Digests of samples and images, with the sources that have them."""

    def __init__(self) -> None:
        columns = "kind INTEGER, digest BLOB, source INTEGER, times INTEGER, PRIMARY KEY (kind, digest, source)"
        self._table = disk_table(f"CREATE TABLE met ({columns}) WITHOUT ROWID")

    def add(self, source: int, lines: pa.RecordBatch) -> None:
        digests = [(CONTENT, lines.column("content")), (IMAGE, lines.column("images").flatten().field("sha256"))]
        self._table.executemany(
            "INSERT INTO met VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET times = times + 1",
            ((kind, digest[:16], source) for kind, column in digests for digest in column.to_pylist()),
        )

    def shared(self, names: list[str]) -> Iterator[Shared]:
        pairs: dict[tuple[int, int], list[int]] = {}
        for first, second, kind, count in self._table.execute(
            "SELECT a.source, b.source, a.kind, count(*) FROM met a JOIN met b "
            "ON a.kind = b.kind AND a.digest = b.digest "
            "AND (a.source < b.source OR a.source = b.source AND a.times > 1) "
            "GROUP BY 1, 2, 3"
        ):
            pairs.setdefault((first, second), [0, 0])[kind] = count
        for (first, second), counts in sorted(pairs.items()):
            yield Shared(names[first], names[second], *counts)
