"""The constant of a compiled pipeline is read as it was written, and refused where it is of another version."""

from __future__ import annotations

import json

import pytest

from vlmpipe.records.compiled import CompiledSettings
from vlmpipe.trainer.errors import ConfigError

SETTINGS = CompiledSettings(
    target="vertex",
    root_uri="gs://bucket/root",
    stage="align",
    stages=("align", "finetune"),
    run_file={"train": {"trainer": None, "epochs": 2}},
    fixed={"align": {"name": "digits", "notify": None}},
    parameters={"epochs": 2, "learning_rate": 2e-3, "resume": "auto"},
    disks={"align": {"prepare-data": 500}},
)


def test_the_constant_is_read_as_it_was_written() -> None:
    text = SETTINGS.text()
    assert CompiledSettings.read(text) == SETTINGS and CompiledSettings.read(text).text() == text
    assert json.loads(text)["fixed"]["align"]["notify"] is None, "a fixed field may be null"


def test_a_field_of_a_later_version_is_left_out_and_a_missing_one_refused() -> None:
    content = json.loads(SETTINGS.text())
    assert CompiledSettings.read(json.dumps(content | {"of_a_later_version": 1})) == SETTINGS
    del content["fixed"]
    with pytest.raises(ConfigError, match="the compiled pipeline is not of this version of vlmpipe, by fixed"):
        CompiledSettings.read(json.dumps(content))
