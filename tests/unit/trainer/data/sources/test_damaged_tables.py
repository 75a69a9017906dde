"""Damaged and made-up Parquet and Arrow files end in words: no crash, and no memory beyond what a row may take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.data.prepared import png
from tests.support.fuzz import fuzzed
from tests.support.short_form import WHOLE
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source, parquet, parquet_pages
from vlmpipe.trainer.data.sources.parquet_pages import TooLargeRowError, column_chunks, row_bytes
from vlmpipe.trainer.errors import UserError

KIB = 1 << 10
ROWS = [
    {"image": {"bytes": png(n), "path": f"{n}.png"}, "question": f"What is {n}?", "answer": "It."} for n in range(6)
]


def read(path: Path) -> list[Sample | Reject]:
    return list(open_source(DataConfig(source=str(path), sequence_length=100, max_image_bytes=100 * KIB)))


def sized(path: Path, columns: list[str]) -> int:
    """`row_bytes` of the first row group."""
    return row_bytes(path, column_chunks(path)[0], pq.ParquetFile(path).metadata.row_group(0).num_rows, columns)


def write_arrow(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, table = tmp_path_factory.mktemp("rows"), pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "a.parquet", write_page_checksum=True)
    pq.write_table(table, folder / "b.parquet", use_dictionary=False, compression="zstd", row_group_size=2)
    write_arrow(folder / "a.arrow", table)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@fuzzed(400, share=5)
@given(
    name=st.sampled_from(["a.parquet", "b.parquet", "a.arrow"]),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
)
def test_every_flip_is_a_sentence_or_rows(
    originals: dict[str, bytes], tmp_path: Path, name: str, place: float, byte: int
) -> None:
    data = bytearray(originals[name])
    data[int(place * len(data))] ^= byte
    path = tmp_path / name
    path.write_bytes(data)
    try:
        found = read(path)
    except UserError:
        event("refused in words")
        return
    event("rows or rejects")
    assert len(found) == len(ROWS)


@pytest.mark.parametrize("percent", range(0, 100, 5))
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_no_part_of_a_file_is_the_whole(originals: dict[str, bytes], tmp_path: Path, name: str, percent: int) -> None:
    whole = originals[name]
    arrived = len(whole) * percent // 100
    for content in (whole[:arrived], whole[:arrived] + bytes(len(whole) - arrived)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError):
            read(tmp_path / name)


def test_offsets_that_point_out_of_an_arrow_file_are_damage(tmp_path: Path) -> None:
    """Reading them ended the process, or gave other memory of it."""
    table = pa.table({"answer": ["one", "two", "three"], "question": ["a", "b", "c"]})
    whole = write_arrow(tmp_path / "a.arrow", table).read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 3, 6, 11))
    assert whole.count(offsets) == 1
    (tmp_path / "a.arrow").write_bytes(
        whole.replace(offsets, offsets[:8] + (1 << 30).to_bytes(4, "little") + offsets[12:])
    )
    with pytest.raises(UserError, match=r"a\.arrow cannot be read"):
        read(tmp_path / "a.arrow")


def test_a_value_that_each_row_repeats_is_read_a_row_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"\0" * 200 * KIB
    images = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array([large]))
    table = pa.table({"image": images, "question": ["What?"] * 40, "answer": ["It."] * 40})
    pq.write_table(
        table, tmp_path / "a.parquet", compression="zstd", data_page_size=1 << 28, dictionary_pagesize_limit=1 << 28
    )
    assert (tmp_path / "a.parquet").stat().st_size < 6 * KIB
    assert len(large) <= sized(tmp_path / "a.parquet", ["image"]) < 2 * len(large)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1000 * KIB)
    batches: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def counted(file: pq.ParquetFile, rows: int, **options: Any) -> Any:
        batches.append(rows)
        return iter_batches(file, rows, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    found = read(tmp_path / "a.parquet")
    assert batches == [4] and [type(one) for one in found] == [Reject] * 40
    monkeypatch.setattr(parquet_pages, "MAX_ROW_BYTES", 100 * KIB)
    with pytest.raises(TooLargeRowError):
        sized(tmp_path / "a.parquet", ["image", "answer"])
    with pytest.raises(UserError, match="a row may take"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["c", "a.b"])
def test_a_column_counts_whatever_its_name(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({name: ["x" * 50_000] * 8}), tmp_path / "a.parquet")
    assert sized(tmp_path / "a.parquet", [name]) > 50_000


def test_usual_rows_are_read_together(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS * 20), tmp_path / "a.parquet")
    assert parquet._rows_at_once(sized(tmp_path / "a.parquet", list(ROWS[0]))) == parquet.BATCH_ROWS


def test_a_column_that_the_footer_does_not_describe_is_refused(originals: dict[str, bytes], tmp_path: Path) -> None:
    """pyarrow ends the process where it is asked for such a column."""
    path = tmp_path / "a.parquet"
    path.write_bytes(originals["a.parquet"])
    (chunks,) = column_chunks(path)
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
        of_pyarrow = [group.column(number) for number in range(group.num_columns)]
    assert [(chunk.place, chunk.size_bytes) for chunk in chunks] == [
        (column.path_in_schema, column.total_compressed_size) for column in of_pyarrow
    ]
    assert [chunk.start for chunk in chunks] == [column.dictionary_page_offset for column in of_pyarrow]
    data = originals["a.parquet"]
    for place in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data), 1 if WHOLE else 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with contextlib.suppress(UserError):
            assert len(read(path)) == len(ROWS)
