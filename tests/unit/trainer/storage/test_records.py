"""Records of a run whose folder of runs was moved or copied: addresses are those where it lies now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import as_it_lies, read_record, write_record, write_run_file

STAGE = "r1/stages/align"


def write_run(root: Path, run_id: str = "r1") -> None:
    """A run, with the prepared data and the export of another run that it names."""
    store = open_storage(str(root / "runs" / run_id))
    weights = {"weights": str(root / "runs/base/export")}
    write_record(
        store, "run.json", {"run": {"run_id": run_id, "root_uri": str(root)}, "model": {"pretrained": weights}}
    )
    write_record(store, "prepared.json", {"prepared_uri": str(root / "prepared/0a"), "features_uri": ""})
    (root / "prepared/0a").mkdir(parents=True, exist_ok=True)


def read(root: Path, name: str, run_id: str = "r1") -> dict[str, Any]:
    return read_record(open_storage(str(root / "runs" / run_id)), name)


@pytest.mark.parametrize("run_id", ["r1", STAGE])
def test_addresses_move_with_the_folder_of_all_runs(run_id: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", run_id)
    after = (tmp_path / "a").rename(tmp_path / "b")
    found = read(after, "run.json", run_id)
    assert found["run"]["root_uri"] == str(after)
    assert found["model"]["pretrained"]["weights"] == str(after / "runs/base/export")
    assert read(after, "prepared.json", run_id)["prepared_uri"] == str(after / "prepared/0a")


def test_a_copy_has_its_own_files_and_of_what_was_not_copied_the_old_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a/runs/r1", tmp_path / "b/runs/r1")
    assert read(tmp_path / "b", "prepared.json")["prepared_uri"] == str(tmp_path / "a/prepared/0a")
    shutil.copytree(tmp_path / "a/prepared", tmp_path / "b/prepared")
    assert read(tmp_path / "b", "prepared.json")["prepared_uri"] == str(tmp_path / "b/prepared/0a")
    assert read(tmp_path / "a", "prepared.json")["prepared_uri"] == str(tmp_path / "a/prepared/0a")


def test_a_folder_that_is_reached_by_a_link_was_not_moved(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    write_run(tmp_path / "link")
    assert read(tmp_path / "disk", "run.json")["run"]["root_uri"] == str(tmp_path / "link")


@pytest.mark.parametrize(
    ("run", "folder"),
    [
        ({"run_id": "r1", "root_uri": "gs://bucket/root"}, "/mnt/root/runs/r1"),
        ({"run_id": "r1", "root_uri": "/a"}, "/copies/r1"),
        ({"run_id": "r1", "root_uri": "/a"}, "/b/runs/r1-renamed"),
        ({"run_id": "r1", "root_uri": "a"}, "/b/runs/r1"),
        ({}, "/b/runs/r1"),
    ],
)
def test_other_addresses_stay(run: dict[str, str], folder: str) -> None:
    """Of a bucket, of a folder of another form, and without a word of where the run was made."""
    record = {"prepared_uri": f"{run.get('root_uri', '/a')}/prepared/0a", "elsewhere": "/a-b/c", "count": 3}
    assert as_it_lies(record, {"run": run}, folder) == as_it_lies(record, {"run": [1]}, folder) == record


def test_what_only_begins_alike_stays(tmp_path: Path) -> None:
    record = {"data": [f"{tmp_path}/a-b/c", "a", None, 2.5], "uri": f"{tmp_path}/a/prepared/0a"}
    found = as_it_lies(record, {"run": {"run_id": "r1", "root_uri": f"{tmp_path}/a"}}, f"{tmp_path}/b/runs/r1")
    assert found == {"data": [f"{tmp_path}/a-b/c", "a", None, 2.5], "uri": f"{tmp_path}/b/prepared/0a"}


def test_records_keep_their_place_where_a_moved_run_is_started_again(tmp_path: Path) -> None:
    """run.json then names the new root, and says no longer from where the others were moved."""
    write_run(tmp_path / "a")
    after = (tmp_path / "a").rename(tmp_path / "b")
    write_run_file(open_storage(str(after / "runs/r1")), {"run": {"run_id": "r1", "root_uri": str(after)}})
    assert read(after, "prepared.json")["prepared_uri"] == str(after / "prepared/0a")
    (after / "runs/r1/prepared.json").write_text("{")
    write_run_file(open_storage(str(after / "runs/r1")), {"run": {"run_id": "r1", "root_uri": "/a"}})
    assert (after / "runs/r1/prepared.json").read_text() == "{", "a damaged one is left to those who read it"
