"""Records are read by their type: older and newer ones, damaged ones, and those of another version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import unseal, write_record

POINTERS = {"prepared_uri": "/data/prepared/0a", "features_uri": "", "features": "off"}


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_a_written_record_is_read_again_and_has_no_version_in_its_first_form(store: LocalStorage) -> None:
    record = DataPointers.of(POINTERS, "here")
    record.write(store)
    assert DataPointers.read(store) == record
    assert unseal(store.read(DataPointers.FILE)) == POINTERS


def test_a_field_of_a_later_version_is_left_out(store: LocalStorage) -> None:
    write_record(store, DataPointers.FILE, {**POINTERS, "colour": "red"})
    assert DataPointers.read(store) == DataPointers.of(POINTERS, "here")


def test_a_later_form_is_refused_with_the_version_to_use(store: LocalStorage) -> None:
    write_record(store, DataPointers.FILE, {**POINTERS, "record_version": 2})
    with pytest.raises(ConfigError) as caught:
        DataPointers.read(store)
    assert "record_version 2" in caught.value.found and "at most 1" in str(caught.value.expected)
    assert caught.value.fix == "use the vlmpipe that made the run"


def test_a_record_without_its_fields_names_them(store: LocalStorage) -> None:
    write_record(store, DataPointers.FILE, {"features": "off"})
    with pytest.raises(ConfigError) as caught:
        DataPointers.read(store)
    assert caught.value.code == ExitCode.CONFIG
    assert caught.value.found.endswith("prepared.json is not of this version of vlmpipe, by prepared_uri, features_uri")


def test_a_missing_record_names_the_step_that_writes_it(store: LocalStorage) -> None:
    assert DataPointers.read_if_there(store) is None
    with pytest.raises(ConfigError, match="which the step prepare-data writes"):
        DataPointers.require(store)
    with pytest.raises(UserError):
        DataPointers.read(store)


def test_a_damaged_record_is_refused(store: LocalStorage) -> None:
    DataPointers.of(POINTERS, "here").write(store)
    damaged = json.dumps(json.loads(store.read(DataPointers.FILE)) | {"features": "reuse"}, indent=1)
    store.write(DataPointers.FILE, damaged.encode())
    with pytest.raises(UserError, match="damaged"):
        DataPointers.read(store)
