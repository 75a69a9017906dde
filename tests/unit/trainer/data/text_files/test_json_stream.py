"""Reading JSON piece by piece gives what the standard library gives, however it is cut into pieces."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.text_files import json_stream as json_reader
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, JsonReader

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def read_items(data: bytes, chunk_bytes: int = 1 << 20) -> list[Any]:
    with mock.patch.object(json_reader, "CHUNK_BYTES", chunk_bytes):
        reader = JsonReader(io.BytesIO(data))
        items = list(reader.items())
        reader.end()
        return items


@given(st.lists(values, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_array_read_in_pieces_equals_the_array(items: list[Any], chunk: int, indent: int | None, ascii_: bool) -> None:
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_)
    data = b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass" if ascii_ else "replace")
    expected = json.loads(data.decode("utf-8-sig"))
    assert repr(read_items(data, chunk)) == repr(expected)  # by repr: nan is not equal to itself


@given(st.lists(values, min_size=1, max_size=4), st.integers(1, 40), st.data())
def test_truncated_array_is_always_detected(items: list[Any], chunk: int, data: st.DataObject) -> None:
    whole = json.dumps(items).encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadJsonError):
        read_items(whole[:cut], chunk)


@given(st.dictionaries(st.text(), st.lists(values, max_size=3), max_size=4), st.integers(1, 40))
def test_object_is_read_or_skipped_key_by_key(content: dict[str, list[Any]], chunk: int) -> None:
    with mock.patch.object(json_reader, "CHUNK_BYTES", chunk):
        reader = JsonReader(io.BytesIO(json.dumps(content).encode()))
        found = {}
        for number, key in enumerate(reader.keys()):
            if number % 2:
                reader.skip()
            else:
                found[key] = list(reader.items())
        reader.end()
    assert repr(found) == repr({key: content[key] for number, key in enumerate(content) if not number % 2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the end instead of '\\['"),
        (b"[1 2]", "'2' instead of"),
        (b"[1] 2", "'2' after the end"),
        (b'[{"a": x}]', "Expecting value at character 7"),
        (b'[{"a" 1}]', "delimiter at character 6"),
        (b"[" * 1_000_000, "nested too deep"),
        (b"[" * 102 + b"1" + b"]" * 102, "nested too deep"),
        (b"[" + b"1" * 5000 + b"]", "4300 digits"),
    ],
)
def test_invalid_json_is_located(data: bytes, message: str) -> None:
    with pytest.raises(BadJsonError, match=message):
        read_items(data)


def test_overlong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "LONGEST_VALUE_CHARS", 10_000)
    with pytest.raises(BadJsonError, match="more than 10000 characters"):
        read_items(b'["' + b"a" * 50_000, 100)


def test_memory_does_not_grow_with_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "CHUNK_BYTES", 4096)

    def peak_bytes(count: int) -> int:
        data = json.dumps([{"id": number, "text": "x" * 100} for number in range(count)]).encode()
        tracemalloc.start()
        assert sum(1 for _ in JsonReader(io.BytesIO(data)).items()) == count
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak_bytes(10)  # what is imported once
    assert peak_bytes(4000) < peak_bytes(400) + 20_000
