"""Records of what was submitted from this folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from vlmpipe.runs.submitted import SUBMITTED, RunRecord, run_records
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


def test_fields_of_a_later_release_are_left_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = RunRecord("projects/p/locations/l/pipelineJobs/a", "gs://bucket/runs/a", 5.0)
    write_record(LocalStorage(SUBMITTED), "a.json", {**dataclasses.asdict(record), "queue": "night"})
    (found,) = run_records().values()
    assert (found.resource_name, found.run_uri) == (record.resource_name, record.run_uri)
