"""Prepared data is found again, made anew when it is not whole, and never left half-made."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import job_config, llava_folder, prepare_llava, prepared_files, run_prepare, write_json
from vlmpipe.trainer.data.prepare import pipeline as prepare_module
from vlmpipe.trainer.data.prepare.chunks import merge as merge_module
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.errors import ExitCode, UserError


def test_a_second_run_reuses_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = prepare_llava(tmp_path)
    monkeypatch.setattr(prepare_module, "_build", None)
    again = run_prepare(config)
    assert again.reused
    assert (again.uri, again.fingerprint, again.counts) == (prepared.uri, prepared.fingerprint, prepared.counts)


def test_leftovers_without_done_are_cleaned_and_rebuilt(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path)
    whole = prepared_files(prepared.uri)
    Path(prepared.uri, "DONE").unlink()
    Path(prepared.uri, "shards", "train-000099.tar").write_bytes(b"left over")
    Path(prepared.uri, "index.arrow").write_bytes(b"half")
    again = run_prepare(config)
    assert not again.reused
    assert prepared_files(again.uri) == whole


def test_prepared_data_with_a_file_missing_is_made_anew(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path)
    whole = prepared_files(prepared.uri)
    Path(prepared.uri, "shards", "train-000000.tar").unlink()
    assert not run_prepare(config).reused
    assert prepared_files(prepared.uri) == whole


def test_an_interrupted_build_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_module, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_llava(tmp_path)
    assert not (tmp_path / "root" / "prepared").exists()


def test_full_disk_is_reported_and_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="no space left") as caught:
        patch.setattr("vlmpipe.trainer.data.shards.tar.ShardWriter.add", full)
        prepare_llava(tmp_path)
    assert caught.value.code == ExitCode.CANNOT_WRITE
    images, source = tmp_path / "images", tmp_path / "data.json"
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    assert run_prepare(config).counts["accepted"] == 40


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"pack": False}, True),
        ({"validation_fraction": 0.3}, False),
        ({"sequence_length": 300}, False),
        ({"max_samples": 5}, False),
        ({"max_reject_fraction": 0.5}, False),
        ({"image_size": 64}, False),
        ({"tokenizer": "train:301"}, False),
    ],
)
def test_the_fingerprint_changes_with_what_changes_the_bytes(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    images, records = llava_folder(tmp_path, 3)
    source = write_json(tmp_path / "a.json", records)
    settings = {"source": str(source), "image_folder": str(images)}
    first = fingerprint(job_config(tmp_path, **settings))
    assert (fingerprint(job_config(tmp_path, **settings | change)) == first) is same


def test_the_fingerprint_does_not_depend_on_the_root(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    first, second = (fingerprint(job_config(tmp_path / root, **settings)) for root in ("a", "b"))
    assert first == second


def test_the_fingerprint_changes_with_a_sources_own_question(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    source = {"name": "a", "uri": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    first, same, other = (
        fingerprint(job_config(tmp_path, sources=[source | own]))
        for own in ({}, {"caption_question": ""}, {"caption_question": "Is there a cat?"})
    )
    assert first == same != other
