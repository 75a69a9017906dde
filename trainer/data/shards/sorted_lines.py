"""Sorts the lines of many chunks into the index of prepared data, in memory that does not grow with them.

Lines are written to files by ranges of ids, and each file is sorted by itself. The ranges come from the ids of every
n-th line. A range that is too large for memory is divided again.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlmpipe.trainer.data.malloc_trim import trim_memory
from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.shards.index_file import IndexFileWriter
from vlmpipe.trainer.data.shards.index_lines import SCHEMA, WIDEST, schema_with
from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX

SORTED_ROWS = 1 << 17  # in memory at a time, some 400 bytes each
EVERY = 256  # lines, of which one's id is looked at; of many lines one in twice as many, and so on
MAX_KEYS = 1 << 15  # ids that are kept, some 120 bytes each
# From which line on in each chunk: another one than in the chunks before, so that chunks whose ids have equal spreads
# do not all show the same parts of the ids, while all lines of the parts between lie in one range.
STRIDE = 159
MAX_FILES = 64  # that are written at a time

Key = tuple[Split, str]  # split and id, by which lines are sorted
ReadLines = Callable[[], pa.Table]  # a chunk's lines, in order, with the shards' names in the whole


class SortedLines:
    """The lines of chunks, which are read twice: when they are added, and when the index is written."""

    def __init__(self) -> None:
        self._chunks: list[ReadLines] = []
        self._keys: list[list[Key]] = []  # of one in `_every` lines of each chunk
        self._num_keys = 0
        self._every = EVERY
        self._optional: set[str] = set()  # columns that some chunk has

    def add(self, lines: pa.Table, again: ReadLines) -> None:
        """Add a chunk. `again` returns the same lines."""
        first = len(self._chunks) * STRIDE % self._every
        few = lines.select(["split", "id"]).take(np.arange(first, len(lines), self._every))
        self._keys.append(list(zip(few.column("split").to_pylist(), few.column("id").to_pylist(), strict=True)))
        self._num_keys += len(few)
        if self._num_keys > MAX_KEYS:
            self._leave_half_out()
        self._optional.update(set(lines.column_names) - set(SCHEMA.names))
        self._chunks.append(again)

    def _leave_half_out(self) -> None:
        """Keep the ids of the lines that one in twice as many would have been."""
        for chunk, keys in enumerate(self._keys):
            self._keys[chunk] = keys[chunk * STRIDE // self._every % 2 :: 2]
        self._every, self._num_keys = 2 * self._every, sum(map(len, self._keys))

    def write_index(self, folder: Path, shards: Mapping[Split, Sequence[str]]) -> None:
        """Write the index. `shards`: the names of each split's shards, in order."""
        with (
            tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as scratch,
            IndexFileWriter(folder, shards, optional=self._optional) as index,
        ):
            chunks = (_widened(chunk()) for chunk in self._chunks)
            for lines in _sorted(chunks, sorted(chain(*self._keys)), self._every, Path(scratch)):
                index.add(lines.select(schema_with(self._optional).names))
                del lines  # before the next ones are read
                trim_memory()


def _sorted(tables: Iterable[pa.Table], keys: Sequence[Key], every: int, folder: Path) -> Iterator[pa.Table]:
    """Sort lines. Each table is sorted, and `keys` are those of about one in `every` lines."""
    files = min(MAX_FILES, -(-len(keys) * every // SORTED_ROWS))
    cuts = sorted({keys[len(keys) * number // files] for number in range(1, files)} - {*keys[:1]})
    if not cuts:
        yield _in_order(pa.concat_tables([WIDEST.empty_table(), *tables]))
        return
    paths = [folder / str(number) for number in range(len(cuts) + 1)]
    with ExitStack() as opened:
        writers = [opened.enter_context(pa.ipc.new_stream(str(path), WIDEST)) for path in paths]
        for table in tables:
            for writer, (start, stop) in zip(writers, pairwise(_places(table, cuts)), strict=True):
                if stop > start:
                    writer.write_table(table.slice(start, stop - start))
    borders = [0, *(bisect_left(keys, cut) for cut in cuts), len(keys)]
    for path, (start, stop) in zip(paths, pairwise(borders), strict=True):
        below = path.with_name(f"{path.name}-ranges")
        below.mkdir()
        yield from _sorted(_stored(path), keys[start:stop], every, below)
        path.unlink()


def _places(table: pa.Table, cuts: Sequence[Key]) -> list[int]:
    """Where the ranges between `cuts` begin in a sorted table, and its length."""
    splits, ids = (table.column(name).combine_chunks() for name in ("split", "id"))
    places = [0]
    for cut in cuts:
        lines = range(places[-1], len(table))
        place = bisect_left(lines, cut, key=lambda line: (splits[line].as_py(), ids[line].as_py()))
        places.append(places[-1] + place)
    return [*places, len(table)]


def _stored(path: Path) -> Iterator[pa.Table]:
    """Tables of a file, each sorted: what was written at once."""
    with pa.ipc.open_stream(str(path)) as stream:
        for batch in stream:
            yield pa.Table.from_batches([batch])


def _in_order(lines: pa.Table) -> pa.Table:
    lines = lines.combine_chunks()
    order = pc.sort_indices(lines, sort_keys=[("split", "ascending"), ("id", "ascending")])
    return lines.take(order)


def _widened(lines: pa.Table) -> pa.Table:
    """The lines with all columns; those that the chunk does not have are null."""
    for name in WIDEST.names:
        if name not in lines.column_names:
            field = WIDEST.field(name)
            lines = lines.append_column(field, pa.nulls(len(lines), field.type))
    return lines.select(WIDEST.names)
