"""A run's marker is read in every form, and refused where it is damaged."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.runs.folders.marker import MARKER, Marker, read_marker
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.records import seal


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"version": None}, None),
        ({"version": "1"}, None),
        ({"version": 12}, None),
        ({"version": 1.0}, {}),
        ({"exit_code": "65"}, {"exit_code": 65}),
        ({"started_s": 7}, {"started_s": 7.0}),
        ({"future": ["version"]}, {}),
        ({"version": None, "arguments": ["version"]}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_marker_is_read_in_any_form_that_json_allows(
    fields: dict[str, object], expected: dict[str, Any] | None, indent: int | None, is_sealed: bool, tmp_path: Path
) -> None:
    """The form that vlmpipe writes is read in one pass, others step by step: with the same outcome."""
    marker = Marker("mine", "digest", ("a.yaml",), started_s=5.0, exit_code=0)
    written = {
        name: value for name, value in {**asdict(marker), **fields}.items() if (name, value) != ("version", None)
    }
    text = seal(written, indent=indent) if is_sealed else json.dumps(written, indent=indent).encode()
    (tmp_path / MARKER).write_bytes(text)
    assert read_marker(tmp_path) == (None if expected is None else replace(marker, **expected))


@pytest.mark.parametrize("field", ["started_s", "ended_s"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_marker_whose_times_are_no_numbers_is_damaged(
    value: float, field: str, indent: int | None, tmp_path: Path
) -> None:
    marker = asdict(Marker("mine", "digest", ("a.yaml",), started_s=5.0, exit_code=0))
    (tmp_path / MARKER).write_bytes(seal({**marker, field: value}, indent=indent))
    with pytest.raises(DataError) as error:
        read_marker(tmp_path)
    assert MARKER in error.value.found and "finite" in error.value.found
