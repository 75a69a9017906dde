"""Where a Parquet file's columns lie and what the headers of their pages say, read without decoding a value.

The footer says where a column's pages are. Of their sizes a damaged or made-up footer may say less than the pages hold,
so these come from the pages' own headers. A dictionary holds a value once and names it in
each row, so a file of 50 KB may become gigabytes. Both are structs of Thrift's compact protocol (apache/thrift,
doc/specs/thrift-compact-protocol.md; apache/parquet-format, parquet.thrift), with fields in any order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Fields of PageHeader and of its parts.
TYPE, UNCOMPRESSED, COMPRESSED, PARTS, ENCODINGS = 1, 2, 3, (5, 8), {5: 2, 8: 4}
DICTIONARY_PAGE = 2
DELTA_BYTE_ARRAY = 7  # an encoding, in which a value may repeat the one before it
FIRST_READ_BYTES, MAX_HEADER_BYTES = 1 << 10, 16 << 20  # statistics in a header hold values
MAGIC = b"PAR1"
# Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
ROW_GROUPS, COLUMNS, DESCRIPTION, PLACE, SIZE, DATA_PAGE, DICTIONARY = 4, 1, 3, 3, 7, 9, 11
MAX_VARINT_BYTES, MAX_DEPTH = 10, 8
MAX_ROW_BYTES = 1 << 30
Fields = dict[int, object]  # of a struct, by their numbers
TRUE, FALSE, BYTE, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12


class PageHeaderError(Exception):
    """A footer or a page's header that is none, or leads out of its file or column."""


@dataclass(frozen=True)
class Page:
    """Fields of a page's header."""

    uncompressed_bytes: int
    num_values: int
    is_dictionary: bool
    repeats: bool  # values may be longer than what is stored of them


@dataclass(frozen=True)
class ColumnChunk:
    """A column of a row group: its place in the schema, and where its pages begin and how long they are, in bytes."""

    place: str
    start: int
    size_bytes: int

    @classmethod
    def of(cls, fields: Fields) -> ColumnChunk:
        """From ColumnMetaData. Some writers name no dictionary, and begin with one. Raises KeyError, ValueError."""
        numbers = {name: value for name, value in fields.items() if isinstance(value, int)}
        starts = [numbers[DATA_PAGE]] + ([numbers[DICTIONARY]] if fields.get(DICTIONARY) else [])
        place = _listed(fields, PLACE)
        parts = [part.decode() for part in place if isinstance(part, bytes)]
        if len(parts) < len(place):
            raise ValueError("a name that is no text")
        if min(*starts, 0) < 0 or numbers[SIZE] < 0:
            raise ValueError("a place before the file's beginning")
        return cls(".".join(parts), min(starts), numbers[SIZE])


def _listed(fields: Fields, number: int) -> list[object]:
    """A list in a field. Raises KeyError, ValueError."""
    value = fields[number]
    if not isinstance(value, list):
        raise ValueError(f"field {number} is no list")
    return value


def _struct(value: object) -> Fields:
    """A struct in a field or in a list. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a value that is no struct")
    return value


def pages(file: BinaryIO, start: int, size_bytes: int) -> Iterator[Page]:
    """The pages of a column of a row group. Raises PageHeaderError."""
    end = start + size_bytes
    while start < end:
        header, header_bytes = _header(file, start, end)
        uncompressed, compressed = header.get(UNCOMPRESSED), header.get(COMPRESSED)
        if not (isinstance(uncompressed, int) and isinstance(compressed, int) and min(uncompressed, compressed) >= 0):
            raise PageHeaderError(f"a page at byte {start:,} has no size")
        parts = {part: inner for part in PARTS if isinstance(inner := header.get(part), dict)}
        yield Page(
            uncompressed,
            max((value for part in parts.values() if isinstance(value := part.get(1), int)), default=0),
            header.get(TYPE) == DICTIONARY_PAGE,
            any(part.get(ENCODINGS[number]) == DELTA_BYTE_ARRAY for number, part in parts.items()),
        )
        start += header_bytes + compressed


def _header(file: BinaryIO, start: int, end: int) -> tuple[Fields, int]:
    """The fields of a page's header, and its length."""
    limit = FIRST_READ_BYTES
    while True:
        file.seek(start)
        data = file.read(min(limit, end - start))
        reader = _Compact(data)
        try:
            return reader.struct(), reader.at
        except IndexError:  # more of it follows
            if len(data) < limit or limit >= MAX_HEADER_BYTES:
                raise PageHeaderError(f"the header of a page at byte {start:,} does not end") from None
            limit = min(8 * limit, MAX_HEADER_BYTES)


def column_chunks(path: Path) -> list[list[ColumnChunk]]:
    """The columns of each row group, by the file's footer. Raises PageHeaderError.

    pyarrow's own view of them aborts the process where a damaged footer leaves a column without its description.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - len(MAGIC) - 4
        file.seek(max(0, end))
        size_bytes = int.from_bytes(file.read(4), "little")
        if file.read() != MAGIC or size_bytes > end:
            raise PageHeaderError("its footer is no footer")
        file.seek(end - size_bytes)
        reader = _Compact(file.read(size_bytes), keeps=True)
    try:
        groups = [_listed(_struct(group), COLUMNS) for group in _listed(reader.struct(), ROW_GROUPS)]
        return [[ColumnChunk.of(_struct(_struct(chunk)[DESCRIPTION])) for chunk in chunks] for chunks in groups]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PageHeaderError("its footer describes no columns") from error


class _Compact:
    """Reads values of Thrift's compact protocol. Raises IndexError after the data's end."""

    def __init__(self, data: bytes, *, keeps: bool = False) -> None:
        self._data, self.at, self._keeps = data, 0, keeps

    def struct(self, depth: int = 0) -> Fields:
        """Values by the number of their field; texts and lists only where they are kept, else None."""
        if depth > MAX_DEPTH:
            raise PageHeaderError(f"a header has structs {depth} deep")
        fields: Fields = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._zigzag()
            fields[number] = self._value(byte & 0x0F, depth)
        return fields

    def _value(self, kind: int, depth: int) -> object:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self._byte()
        if BYTE < kind <= I64:
            return self._zigzag()
        if kind in (DOUBLE, BINARY):
            self._pass(count := 8 if kind == DOUBLE else self._varint())
            return self._data[self.at - count : self.at] if self._keeps else None
        if kind in (LIST, SET):
            byte = self._byte()
            items, inner = [], byte & 0x0F
            for _ in range(byte >> 4 if byte >> 4 < 15 else self._varint()):
                value = self._byte() if inner in (TRUE, FALSE) else self._value(inner, depth + 1)
                if self._keeps:
                    items.append(value)
            return items if self._keeps else None
        if kind == STRUCT:
            return self.struct(depth + 1)
        raise PageHeaderError(f"a header has a field of the kind {kind}")

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise PageHeaderError(f"a number of more than {MAX_VARINT_BYTES} bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


class TooLargeRowError(Exception):
    """A row may take more memory than any sample needs."""


def row_bytes(path: Path, chunks: Sequence[ColumnChunk], rows: int, columns: Sequence[str]) -> int:
    """Bytes that a row of a row group takes: the mean of what is stored as it is, all of what a value may repeat, as
    often as a row has values in the mean.

    Raises TooLargeRowError beyond MAX_ROW_BYTES, and PageHeaderError.

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
    if total > MAX_ROW_BYTES:
        raise TooLargeRowError(f"a row may take {total:,} bytes, more than {MAX_ROW_BYTES:,}")
    return total
