"""AIP_MODEL_DIR, AIP_CHECKPOINT_DIR and AIP_TENSORBOARD_LOG_DIR, as addresses in a bucket or paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.external import platform_folders
from vlmpipe.trainer.external.platform_folders import CHECKPOINTS, ModelFolder, SlowFolders, watched_folder
from vlmpipe.trainer.storage import base


@pytest.mark.parametrize("is_mounted", [True, False])
def test_an_address_in_a_bucket_is_its_path_below_the_mount(
    is_mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BUCKETS_MOUNT", tmp_path / "gcs")
    if is_mounted:
        (tmp_path / "gcs").mkdir()
    found = watched_folder({CHECKPOINTS: "gs://b/runs/1/checkpoints/"}, CHECKPOINTS)
    assert found == ([tmp_path / "gcs/b/runs/1/checkpoints"] if is_mounted else [])
    assert watched_folder({CHECKPOINTS: "/runs/1/checkpoints/"}, CHECKPOINTS) == [Path("/runs/1/checkpoints")]
    assert watched_folder({}, CHECKPOINTS) == watched_folder({CHECKPOINTS: ""}, CHECKPOINTS) == []


def test_a_mounted_bucket_is_not_looked_into_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_folders, "BUCKETS_MOUNT", tmp_path / "gcs")
    slow = SlowFolders([tmp_path / "disk", tmp_path / "gcs/b/checkpoints"])
    assert [slow.not_due(), slow.not_due()] == [frozenset(), {1}]
    monkeypatch.setattr(platform_folders, "BUCKET_LOOK_S", 0.0)
    slow = SlowFolders([tmp_path / "gcs/b/checkpoints"])
    assert [slow.not_due(), slow.not_due()] == [frozenset(), frozenset()]
    assert SlowFolders([tmp_path / "disk"]).not_due() == frozenset()


def test_the_model_is_what_this_start_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model := tmp_path / "model").mkdir()
    (output := tmp_path / "output").mkdir()
    (model / "old.safetensors").write_text("of an earlier start")
    folder = ModelFolder.of({"AIP_MODEL_DIR": f"{model}/"})
    assert folder and folder.take(output) == 0 and not any(output.iterdir())
    (output / "checkpoint-5").mkdir()  # the program saves its checkpoints to {output}, and its model to the variable
    (output / "checkpoint-5/config.json").write_text("{}")
    (model / "sub").mkdir()
    (model / "sub/config.json").write_text("{}")
    assert folder.take(output) == 1
    assert (output / "sub/config.json").read_text() == "{}" and not (output / "old.safetensors").exists()
    assert "wrote to AIP_MODEL_DIR are the result" in capsys.readouterr().out
    assert folder.take(output) == 0, "the program's {output} comes first"
    assert "1 files in AIP_MODEL_DIR are not" in capsys.readouterr().out
    assert ModelFolder.of({}) is None
