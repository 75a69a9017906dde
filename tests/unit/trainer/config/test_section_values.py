"""What no section of the run file takes: booleans in place of numbers, and control characters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import section_of
from vlmpipe.trainer.config.base import Section, _takes
from vlmpipe.trainer.config.data import DataConfig


def fields(section: type[Section]) -> Iterator[tuple[type[Section], str, FieldInfo]]:
    """All fields of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner:
            yield from fields(inner)  # type: ignore[arg-type]
        else:
            yield section, name, field


ALL = sorted({(section, name) for section, name, _ in fields(RunConfig)}, key=str)


def problems(section: type[Section], name: str, value: Any) -> list[str]:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return [details["msg"] for details in error.errors() if details["loc"][:1] == (name,)]
    return []


def test_numbers_are_no_booleans_in_any_field() -> None:
    found = 0
    for section, name in ALL:
        annotation = section.model_fields[name].annotation
        if _takes(annotation, int, float) and not _takes(annotation, bool):
            found += 1
            assert any("expected a number" in text for text in problems(section, name, True)), (section, name)
    assert found > 100


def test_booleans_are_still_booleans() -> None:
    taken = [name for section, name in ALL if section.model_fields[name].annotation is bool]
    assert len(taken) > 10
    for section, name in ALL:
        if section.model_fields[name].annotation is bool:
            assert not any("expected a number" in text for text in problems(section, name, True)), (section, name)


@pytest.mark.parametrize("value", ["a\0b", "\x1b[2J", ["x", "a\x07"], {"id": "\x7f"}])
def test_control_characters_are_refused_in_any_field(value: Any) -> None:
    for name in ("source", "image_folder", "split_by", "columns"):
        assert any("has the control character U+" in text for text in problems(DataConfig, name, value)), name


def test_line_ends_tabs_and_all_letters_are_text() -> None:
    data = DataConfig(source="d\u202f\u00e9 \u4e2d.json", sequence_length=8, caption_question="Two\n\tlines?")
    assert data.caption_question == "Two\n\tlines?"
