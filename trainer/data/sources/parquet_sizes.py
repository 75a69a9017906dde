"""How much memory rows of a Parquet file take, by the headers of their pages, before any value is decoded.

A dictionary holds a value once and names it in each row, so a file of 50 KB may become gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmpipe.trainer.data.sources.parquet_pages import ColumnChunk, pages

MOST_ROW_BYTES = 1 << 30


class TooLargeRowError(Exception):
    """A row may take more memory than any sample needs."""


def row_bytes(path: Path, chunks: Sequence[ColumnChunk], rows: int, columns: Sequence[str]) -> int:
    """Bytes that a row of a row group takes: the mean of what is stored as it is, all of what a value may repeat, as
    often as a row has values in the mean.

    Raises TooLargeRowError beyond MOST_ROW_BYTES, and PageHeaderError.

    Args:
        chunks, rows: of the row group.
        columns: names of those that are read, with what is nested in them.
    """
    total = 0
    if not rows:  # whose columns have no pages
        return 0
    with path.open("rb") as file:
        for chunk in chunks:
            # A name may have dots.
            if not any(chunk.place == name or chunk.place.startswith(f"{name}.") for name in columns):
                continue
            stored = repeated = num_values = 0
            for page in pages(file, chunk.start, chunk.size_bytes):
                stored += page.uncompressed_bytes
                repeated += page.uncompressed_bytes if page.is_dictionary or page.repeats else 0
                num_values += page.num_values
            total += stored // rows + repeated * max(1, num_values // rows)
    if total > MOST_ROW_BYTES:
        raise TooLargeRowError(f"a row may take {total:,} bytes, more than {MOST_ROW_BYTES:,}")
    return total
