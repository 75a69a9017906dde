"""`vlmpipe status --deep` reads every file of a run and names the first damaged one of each part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.data.prepared import prepare_llava
from tests.support.reports import write_export
from trainer.feature_cache.store import write_shard
from trainer.storage import open_storage
from vlmpipe.runs.file_check import check_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    _, prepared = prepare_llava(tmp_path, count=20)
    features = tmp_path / "features/0123"
    write_shard(open_storage(str(features)), tmp_path, {"ab" * 32: torch.zeros(2, 4, dtype=torch.bfloat16)}, {})
    run = tmp_path / "runs/a"
    write_export(run)
    pointers = {"prepared_uri": prepared.uri, "features_uri": str(features), "features": "reuse"}
    (run / "prepared.json").write_text(json.dumps(pointers))
    return run


def files_of(run: Path) -> dict[str, list[Path]]:
    pointers = json.loads((run / "prepared.json").read_text())
    folders = {"prepared data": pointers["prepared_uri"], "features": pointers["features_uri"]}
    folders["export"] = str(run / "export")
    return {name: sorted(path for path in Path(at).rglob("*") if path.is_file()) for name, at in folders.items()}


def test_a_whole_run_is_whole(run: Path) -> None:
    checks = list(check_files(str(run)))
    assert [(check.part, check.problem) for check in checks] == [(name, "") for name in files_of(run)]
    assert all(check.files for check in checks)


def test_damage_to_any_file_is_found_in_its_part(run: Path) -> None:
    for part, files in files_of(run).items():
        for path in files:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if whole else b"\0")
            assert [check.part for check in check_files(str(run)) if check.problem] == [part], path
            path.unlink()
            if (part, path.suffix) != ("features", ".json"):  # a shard without its sidecar does not count
                assert part in [check.part for check in check_files(str(run)) if check.problem], path
            path.write_bytes(whole)


def test_a_run_that_has_prepared_nothing_yet_has_no_parts(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert list(check_files(str(tmp_path))) == []
