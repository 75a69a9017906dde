"""How much memory rows of a Parquet file take, from its metadata, before any value is decoded.

A dictionary holds a value once and names it in each row, so a file of 50 KB may become gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_ROW_BYTES = 1 << 30
MOST_VARINT_BYTES = 5  # of 32 bits
HEADER_BYTES = 3 + 3 * MOST_VARINT_BYTES
I32_FIELD = 0x15  # the next field, of the type i32, in Thrift's compact protocol
REPEATED = "DELTA_BYTE_ARRAY"  # in which a value may repeat the one before it


class TooLargeRowError(Exception):
    """A row may take more memory than any sample needs."""


def row_bytes(path: Path, group: Any, columns: Sequence[str]) -> int:
    """Bytes that a row of a row group takes: the mean of what is stored as it is, all of what a row may repeat.

    Raises TooLargeRowError beyond MOST_ROW_BYTES.

    Args:
        group: pyarrow's metadata of the row group.
        columns: names of those that are read, with what is nested in them.
    """
    total = 0
    chunks = [group.column(number) for number in range(group.num_columns)]
    for chunk in chunks:
        place = chunk.path_in_schema  # a name may have dots
        if not any(place == name or place.startswith(f"{name}.") for name in columns):
            continue
        size = int(chunk.total_uncompressed_size)
        if chunk.has_dictionary_page:
            total += _dictionary_bytes(path, int(chunk.dictionary_page_offset))
        if REPEATED in chunk.encodings:
            total += size
        total += size // max(1, int(group.num_rows))
    if total > MOST_ROW_BYTES:
        raise TooLargeRowError(f"a row may take {total:,} bytes, more than {MOST_ROW_BYTES:,}")
    return total


def _dictionary_bytes(path: Path, offset: int) -> int:
    """Size of a dictionary once it is uncompressed, by the header of its page (parquet.thrift, PageHeader, field 2)."""
    with path.open("rb") as file:
        file.seek(offset)
        header = file.read(HEADER_BYTES)
    if header[:1] != bytes([I32_FIELD]):
        return 0  # a damaged header, which the reader reports
    _, at = _varint(header, 1)
    if header[at : at + 1] != bytes([I32_FIELD]):
        return 0
    size, _ = _varint(header, at + 1)
    return size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag number, and the place behind it."""
    value = 0
    for shift in range(0, 7 * MOST_VARINT_BYTES, 7):
        byte = data[at] if at < len(data) else 0
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            break
    return value >> 1, at
