"""A job that finds another one's unfinished records in its run's folder says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.components.runtime.earlier_job import unfinished_job
from vlmpipe.trainer.progress import Progress


def begun(run: Path, job_name: str) -> Progress:
    progress = Progress(str(run), "resolve-run", quiet=True)
    progress.update(0, job_name=job_name)
    progress.finish()
    return progress


def test_a_job_without_an_end_is_named(tmp_path: Path) -> None:
    assert unfinished_job(str(tmp_path), str(tmp_path), "job-2") == ""
    begun(tmp_path, "job-1")
    said = unfinished_job(str(tmp_path), str(tmp_path), "job-2")
    assert "job job-1 has begun in this folder too" in said and "exit code 72" in said
    assert unfinished_job(str(tmp_path), str(tmp_path), "job-1") == "", "a retried step of the same job is no other one"


@pytest.mark.parametrize("closes", ["before", "after"])
def test_a_job_that_closed_has_ended(tmp_path: Path, closes: str) -> None:
    if closes == "before":  # the notify of a job before
        Progress(str(tmp_path), "notify", quiet=True).finish()
    begun(tmp_path, "job-1")
    if closes == "after":
        Progress(str(tmp_path), "notify", quiet=True).finish()
    assert bool(unfinished_job(str(tmp_path), str(tmp_path), "job-2")) == (closes == "before")


def test_a_damaged_record_is_no_job(tmp_path: Path) -> None:
    begun(tmp_path, "job-1")
    (tmp_path / "steps/resolve-run.json").write_text("{")
    assert unfinished_job(str(tmp_path), str(tmp_path), "job-2") == ""


def test_the_end_of_a_run_with_stages_is_in_the_runs_own_folder(tmp_path: Path) -> None:
    stage = tmp_path / "stages/align"
    begun(stage, "job-1")
    assert "job job-1" in unfinished_job(str(stage), str(tmp_path), "job-2")
    notify = Progress(str(tmp_path), "notify", quiet=True)
    notify.update(0)
    notify.finish()
    assert unfinished_job(str(stage), str(tmp_path), "job-2") == ""
