"""Rows of BigQuery, through Google's own client against a strict fake of its REST API."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.bigquery import MAX_ROWS, FakeBigQuery, Table
from tests.support.data.prepared import job_config, png, run_prepare
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample, Turn, Unread
from vlmpipe.trainer.data.sources import bigquery, open_source
from vlmpipe.trainer.data.sources.bigquery import EMULATOR
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError

NAME = "my-project.data.samples"
MESSAGE = [{"name": "role", "type": "STRING"}, {"name": "content", "type": "STRING"}]
SCHEMA = [
    {"name": "id", "type": "INTEGER"},
    {"name": "unused", "type": "STRING"},
    {"name": "image", "type": "BYTES"},
    {"name": "messages", "type": "RECORD", "mode": "REPEATED", "fields": MESSAGE},
]


def row(number: int) -> tuple[Any, ...]:
    said = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": f"Noise {number}."}]
    return number, "x", png(number), said


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBigQuery]:
    with FakeBigQuery() as server:
        monkeypatch.setenv(EMULATOR, server.endpoint)
        server.tables[NAME] = Table(SCHEMA, [row(number) for number in range(25)])
        yield server


def read(**data: Any) -> list[Sample | Reject]:
    return list(open_source(DataConfig(source=f"bq://{NAME}", sequence_length=100, **data)))


def test_rows_are_samples_page_by_page(server: FakeBigQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigquery, "PART_ROWS", 10)
    found = read()
    assert [sample.id for sample in found if isinstance(sample, Sample)] == [str(number) for number in range(25)]
    last = found[-1]
    assert isinstance(last, Sample) and last.turns == (Turn("<image>\nWhat?", "Noise 24."),)
    assert last.images[0].read() == png(24) and last.where == f"{NAME} row 25"
    reads = server.tables[NAME].reads
    assert max(count for _, count in reads) <= MAX_ROWS and sum(count for _, count in reads) == 25
    assert last.unread == (Unread("unused", ""),)


def test_an_ignored_column_is_not_fetched(server: FakeBigQuery) -> None:
    assert all(isinstance(one, Sample) and one.unread == () for one in read(columns={"ignored": ["unused"]}))
    assert not any("unused" in request for request in server.requests)


def test_a_table_is_prepared_and_found_again(server: FakeBigQuery, tmp_path: Path) -> None:
    config = job_config(tmp_path, source=f"bq://{NAME}")
    first, again = run_prepare(config), run_prepare(config)
    assert first.counts["accepted"] == 25 and again.reused
    server.tables[NAME].rows.append(row(25))
    server.tables[NAME].modified_ms += 1
    changed = run_prepare(config)
    assert not changed.reused and changed.counts["accepted"] == 26


def test_addresses_in_a_column_are_files_of_the_image_folder(server: FakeBigQuery, tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    schema = [{"name": "image", "type": "STRING"}, {"name": "caption", "type": "STRING"}]
    server.tables[NAME] = Table(schema, [("1.png", "Noise."), ("../1.png", "Outside.")])
    inside, outside = read(image_folder=str(tmp_path))
    assert isinstance(inside, Sample) and inside.images[0].read() == png(1)
    assert isinstance(outside, Reject) and outside.code == RejectCode.REF_UNSAFE_PATH
    with pytest.raises(ConfigError, match="names files in its column image"):
        read()


def test_a_table_that_changes_while_it_is_read_ends_the_step(server: FakeBigQuery) -> None:
    source = iter(open_source(DataConfig(source=f"bq://{NAME}", sequence_length=100)))
    next(source)
    server.tables[NAME].modified_ms += 1
    with pytest.raises(DataError, match="changed while it was read"):
        list(source)


@pytest.mark.parametrize(
    ("table", "code", "message"),
    [
        (None, ExitCode.CONFIG, "BigQuery has no my-project.data.samples"),
        (Table(SCHEMA, [], kind="VIEW"), ExitCode.CONFIG, "is a VIEW, whose rows only a query can give"),
        (Table(SCHEMA, []), ExitCode.DATA, "has no rows"),
        (Table(SCHEMA[:2], [(1, "x")]), ExitCode.DATA, "has the columns id, unused"),
        (Table(SCHEMA, [], denied=("bigquery.tables.get",)), ExitCode.NO_PERMISSION, "BigQuery refuses my-project.dat"),
        (
            Table(SCHEMA, [row(0)], denied=("bigquery.tables.getData",)),
            ExitCode.NO_PERMISSION,
            "Permission bigquery.tables.getData denied",
        ),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    server: FakeBigQuery, table: Table | None, code: ExitCode, message: str
) -> None:
    server.tables = {NAME: table} if table else {}
    with pytest.raises(UserError, match=message) as caught:
        read()
    assert caught.value.code == code


def test_a_request_that_bigquery_calls_wrong_is_no_silence_of_the_network(
    server: FakeBigQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in ("PART_ROWS", "PAGE_ROWS"):
        monkeypatch.setattr(bigquery, rows, 2**32)
    with pytest.raises(ConfigError, match=r"BigQuery refuses .*Invalid value at 'maxResults'"):
        read()


@pytest.mark.parametrize(
    "table",
    ["only.two", "p.data.samples", "my-project.da-ta.samples", "my-project.donn\u00e9es.samples", "my-project.data.a*"],
)
def test_an_address_that_is_no_table_is_refused_before_any_request(table: str) -> None:
    with pytest.raises(ValueError, match="expected bq://PROJECT"):
        DataConfig(source=f"bq://{table}", sequence_length=100)


@pytest.mark.parametrize(
    "name", ["example.com:my-project.data.samples", "my-project.data.my table", f"{NAME}$20260101"]
)
def test_each_name_that_bigquery_allows_is_read(server: FakeBigQuery, name: str) -> None:
    server.tables = {name: Table(SCHEMA, [row(0)])}
    (sample,) = open_source(DataConfig(source=f"bq://{name}", sequence_length=100))
    assert isinstance(sample, Sample) and sample.where == f"{name} row 1"


def test_rows_in_the_streaming_buffer_are_not_left_out_in_silence(server: FakeBigQuery) -> None:
    """`numRows` leaves them out, by the comments of the API's Table."""
    server.tables[NAME].buffered_rows = 3
    with pytest.raises(DataError, match="about 3 rows in its streaming buffer"):
        read()


EACH_TYPE: dict[str, Any] = {
    "INTEGER": 7, "FLOAT": 0.5, "BOOLEAN": True, "NUMERIC": decimal.Decimal("1.5"), "BIGNUMERIC": decimal.Decimal(2),
    "DATE": datetime.date(2026, 1, 2), "TIME": datetime.time(3, 4, 5), "DATETIME": datetime.datetime(2026, 1, 2, 3, 4),
    "TIMESTAMP": datetime.datetime(1960, 1, 2, 3, 4, 5, 6, datetime.UTC), "GEOGRAPHY": "POINT(1 2)",
    "INTERVAL": "1-2 3 4:5:6.5", "JSON": {"a": [1]}, "RANGE": "[2026-01-02, UNBOUNDED)", "BYTES": b"\0",
}  # fmt: skip


@pytest.mark.parametrize("is_null", [False, True])
def test_columns_of_every_type_are_read_or_named_as_unread(server: FakeBigQuery, is_null: bool) -> None:
    ranged = {"rangeElementType": {"type": "DATE"}}
    more = [{"name": f"of_{kind}", "type": kind, **(ranged if kind == "RANGE" else {})} for kind in EACH_TYPE]
    lists = {"name": "several", "type": "STRING", "mode": "REPEATED"}
    values = [None] * (len(more) + 1) if is_null else [*EACH_TYPE.values(), ["a", "b"]]
    server.tables[NAME] = Table([*SCHEMA, *more, lists], [(*row(0), *values)])
    (sample,) = read()
    assert isinstance(sample, Sample)
    unread = {one.name for one in sample.unread}
    assert unread == ({"unused"} if is_null else {"unused", "several", *(f"of_{kind}" for kind in EACH_TYPE)})
