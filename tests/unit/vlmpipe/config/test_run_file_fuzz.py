"""Whatever stands in any field of a run file: it is read, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.fuzz import fuzzed
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.validation_errors import fields_of
from vlmpipe.trainer.errors import ExitCode, UserError

FIELDS = sorted({path for path, _, _ in fields_of(RunConfig)})
SECTIONS = sorted({path.rpartition(".")[0] for path in FIELDS if "." in path} - {""})
VALUES: list[Any] = [
    None, True, False, 0, -1, 10**30, 1.5, float("inf"), float("nan"), "", "text", "a\0b", "\x1b[2J", "\u202egnp",
    "a" * 5000,
    "~", "/", "../..", "gs://", "run:", "{}", [], [[]], [1, "a"], {}, {"a": {"b": 1}}, {1: 2}, {"": None}, ["x"] * 300,
]  # fmt: skip


def with_value(path: str, value: Any) -> dict[str, Any]:
    """TINY with a value at a dotted path, whatever is on the way."""
    content = _copied(TINY)
    *sections, name = path.split(".")
    at = content
    for section in sections:
        inner = at.get(section)
        at[section] = inner if isinstance(inner, dict) else {}
        at = at[section]
    at[name] = value
    return content


def _copied(content: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in content.items()}


def read(content: dict[str, Any]) -> bool:
    """Whether it is read. Any other error than one for users is a traceback for them, and fails the test."""
    try:
        parse_run_config(content, "run file")
    except UserError as error:
        assert error.code == ExitCode.CONFIG
        assert error.text().isprintable() or "\n" in error.text()
        return False
    return True


@fuzzed(400, share=10)
@given(st.lists(st.tuples(st.sampled_from([*FIELDS, *SECTIONS]), st.sampled_from(VALUES)), min_size=1, max_size=2))
def test_any_value_in_any_field_is_read_or_refused(changes: list[tuple[str, Any]]) -> None:
    content = TINY
    for path, value in changes:
        content = with_value(path, value) if content is TINY else {**content, path.partition(".")[0]: value}
    event("read" if read(content) else "refused")


@pytest.mark.parametrize("section", ["sweep", "stages", "tune", "schedule", "notify", "gate", "deploy", "benchmarks"])
def test_any_value_in_a_section_that_needs_keys_of_its_own(section: str) -> None:
    """Sections that code looks into before they are checked."""
    for value in VALUES:
        for content in (
            {**TINY, section: value},
            {**TINY, section: {"grid": value, "variants": value}},
            {**TINY, section: [value]},
        ):
            read(content)
