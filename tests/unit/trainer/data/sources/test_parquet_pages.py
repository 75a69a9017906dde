"""Pages of Parquet files count what their headers say, in every form that Thrift allows, whatever the footer says."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmpipe.trainer.data.sources.parquet_pages import (
    ColumnChunk,
    Page,
    PageHeaderError,
    TooLargeRowError,
    column_chunks,
    pages,
    row_bytes,
)

I32, BINARY, STRUCT, BOOL = 5, 8, 12, 1
Field = tuple[int, int, Any]  # number, kind, value
DICTIONARY = [(1, I32, 2), (2, I32, 5000), (3, I32, 9), (7, STRUCT, [(1, I32, 3), (2, I32, 0), (3, BOOL, None)])]
DATA = [
    (1, I32, 0),
    (2, I32, 700),
    (3, I32, 4),
    (5, STRUCT, [(1, I32, 40), (2, I32, 7), (5, STRUCT, [(1, BINARY, 3000)])]),
]


def varint(value: int, padding: int = 0) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value]) if not padding else bytes([*data, value | 0x80, *[0x80] * (padding - 1), 0])


def written(fields: Sequence[Field], *, long_form: bool = False, reverse: bool = False, padding: int = 0) -> bytes:
    """A struct in Thrift's compact protocol."""
    data, last = b"", 0
    for number, kind, value in reversed(fields) if reverse else fields:
        delta = number - last
        is_short = 0 < delta < 16 and not long_form
        data += bytes([delta << 4 | kind]) if is_short else bytes([kind]) + varint(2 * number)
        last = number
        if kind == I32:
            data += varint(2 * value, padding)
        elif kind == BINARY:
            data += varint(value) + bytes(value)
        elif kind == STRUCT:
            data += written(value, long_form=long_form, reverse=reverse, padding=padding)
    return data + b"\0"


@pytest.mark.parametrize(
    "form",
    [{}, {"long_form": True}, {"reverse": True}, {"padding": 2}, {"long_form": True, "reverse": True, "padding": 1}],
)
def test_every_form_of_a_header_says_the_same(form: dict[str, Any]) -> None:
    column = written(DICTIONARY, **form) + bytes(9) + written(DATA, **form) + bytes(4)
    found = list(pages(io.BytesIO(b"PAR1" + column), 4, len(column)))
    assert found == [Page(5000, 0, True, False), Page(700, 40, False, True)]


@pytest.mark.parametrize(
    "column",
    [
        b"\xff" * 40,
        written(DICTIONARY)[:-3],
        b"\0",
        written([(1, I32, 0), (2, I32, 5)]),
        b"\x1c" * 60,
        b"\x15" + b"\x80" * 12,
        b"\x19\xf5" + varint(1 << 40),
    ],
)
def test_what_is_no_header_is_damage(column: bytes) -> None:
    with pytest.raises(PageHeaderError):
        list(pages(io.BytesIO(column), 0, len(column)))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_dictionary": False}, {"compression": "zstd", "write_page_checksum": True}, {"write_statistics": True}],
)
def test_pages_of_a_real_column_are_all_counted(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    small = {
        "data_page_size": 4096,
        "write_batch_size": 16,
        "write_statistics": False,
        "dictionary_pagesize_limit": 200_000,
    }
    texts = [f"{number} " + "x" * (number % 7 * 900) for number in range(900)]
    pq.write_table(pa.table({"a": texts}), tmp_path / "a.parquet", data_page_version=version, **{**small, **options})
    column = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0)
    start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    with (tmp_path / "a.parquet").open("rb") as file:
        found = list(pages(file, start, column.total_compressed_size))
    assert len(found) > 10 and sum(page.num_values for page in found) == 900
    assert [page.is_dictionary for page in found[1:]] == [False] * (len(found) - 1)
    sizes = sum(page.uncompressed_bytes for page in found)
    header_bytes = 20_000 if "write_statistics" in options else 100  # with the least and the greatest value
    assert 0 < column.total_uncompressed_size - sizes < header_bytes * len(found), "the footer counts headers too"


def test_a_footer_without_the_dictionary_or_with_small_sizes_hides_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x" * 50_000] * 8}), tmp_path / "a.parquet")
    column = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0)
    # As writers that name no dictionary do.
    chunk = ColumnChunk("a", column.dictionary_page_offset, column.total_compressed_size)
    assert row_bytes(tmp_path / "a.parquet", [chunk], 8, ["a"]) > 50_000


def test_a_list_that_repeats_one_large_value_counts_each(tmp_path: Path) -> None:
    """A row of 20,000 times 100 KB is written in a few hundred bytes."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 100_000]))
    lists = pa.ListArray.from_arrays(pa.array([0, 20_000], pa.int32()), value)
    pq.write_table(pa.table({"messages": lists}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 8_000
    (chunks,) = column_chunks(tmp_path / "a.parquet")
    with pytest.raises(TooLargeRowError):
        row_bytes(tmp_path / "a.parquet", chunks, 1, ["messages"])
