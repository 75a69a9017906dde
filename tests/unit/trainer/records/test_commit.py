"""The text of COMMIT: what is written is read again, and what another version wrote is refused by its fields."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.commit import CommitRecord, parse_commit

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def text_of(**changes: Any) -> bytes:
    return json.dumps({**asdict(record()), **changes}).encode()


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.none() | st.floats(allow_nan=False))
def test_what_is_written_is_read_again(settings: dict[str, JsonValue], loss: float | None) -> None:
    written = record(settings=settings, loss=loss, degrees=(2, 1, 4), manifests={"node-0.json": 2**32 - 1})
    assert parse_commit(written.text(), "name") == written


def test_a_loss_that_is_not_finite_is_read_again() -> None:
    loss = parse_commit(record(loss=float("nan")).text(), "name").loss
    assert loss is not None and loss != loss


def test_a_record_without_later_fields_has_their_defaults() -> None:
    later = ("frozen_sha256", "loss", "settings", "degrees", "total_steps", "learning_rate", "manifests_sha256")
    content = {name: value for name, value in asdict(record()).items() if name not in later}
    assert parse_commit(json.dumps(content).encode(), "name") == record()


def test_a_field_of_a_later_version_is_left_out() -> None:
    assert parse_commit(text_of(of_the_future=1), "name") == record()


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "8"), ("step", 8.5), ("loss", "low"), ("degrees", [1, 1]), ("settings", []), ("manifests.a", "1")],
)
def test_another_type_is_refused_with_its_field_rather_than_passed_over(field: str, value: object) -> None:
    name, _, key = field.partition(".")
    with pytest.raises(ConfigError) as caught:
        parse_commit(text_of(**{name: {key: value} if key else value}), "0001-00000008-a")
    assert f"by {field}" in caught.value.found and "0001-00000008-a" in caught.value.found
    assert "version that saved it" in caught.value.fix


@pytest.mark.parametrize("text", [b"", b"<html>", b"[]", b"{}", b"\xff", b'{"format_version": 4}'])
def test_a_text_of_no_version_is_no_record(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_commit(text, "name")


def test_the_text_has_each_field_once_in_their_order() -> None:
    assert list(json.loads(record().text())) == list(CommitRecord.__dataclass_fields__)
