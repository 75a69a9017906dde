"""A row is read alike whatever the process has read before."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from unittest import mock

import pytest

from vlmpipe.trainer.data.text_files import csv_rows as csv_reader
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows


@pytest.fixture(autouse=True)
def limit_of_before() -> Iterator[None]:
    before = csv.field_size_limit()
    yield
    csv.field_size_limit(before)


@pytest.mark.parametrize("limit", [10, 131_072, 1 << 40])
def test_the_limit_of_a_cell_does_not_depend_on_who_set_another(limit: int) -> None:
    csv.field_size_limit(limit)
    assert list(csv_rows(io.StringIO(f"a\tb\n1\t{'x' * 200_000}\n"), "\t")) == [{"a": "1", "b": "x" * 200_000}]


def test_a_cell_above_the_limit_is_an_error() -> None:
    with mock.patch.object(csv_reader, "LONGEST_CELL_CHARS", 8), pytest.raises(csv.Error, match="field limit"):
        list(csv_rows(io.StringIO("a\n123456789\n")))


def test_strict_rows_refuse_text_behind_a_quoted_cell() -> None:
    table = 'a\n"1" 2\n'
    assert list(csv_rows(io.StringIO(table))) == [{"a": "1 2"}]
    with pytest.raises(csv.Error):
        list(csv_rows(io.StringIO(table), is_strict=True))
