"""The run file's schema and reference: every field is described, and the files are renewed."""

from __future__ import annotations

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.config import json_schema as schema
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import closest_field, fields_of


def test_every_field_says_what_it_does() -> None:
    silent = [
        path for path, field, _ in fields_of(RunConfig) if not (field.description or "").strip().endswith((".", ")"))
    ]
    assert silent == []


def test_every_known_field_is_its_own_closest() -> None:
    fields = [path for path, _, _ in fields_of(RunConfig)]
    asked = fields if WHOLE else fields[::10]
    assert [closest_field(path, fields) for path in asked] == asked


def test_the_reference_files_are_up_to_date() -> None:
    folder = ROOT / "docs" / "reference"
    stale = "run: vlmpipe schema --output docs/reference"
    assert (folder / schema.SCHEMA_FILE).read_text() == schema.json_schema(), stale
    assert (folder / schema.REFERENCE_FILE).read_text() == schema.markdown(), stale
