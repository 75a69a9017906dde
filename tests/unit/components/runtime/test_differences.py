"""What a person sees of settings that differ: in the log, in the step's record and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reports import make_run
from vlmpipe.components.runtime.differences import SHOWN_IN_NOTE, record_differences
from vlmpipe.report.build import build_report
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.storage.local import LocalStorage


def recorded(run: Path, differences: dict[str, tuple[object, object]], since: list[str]) -> dict[str, object]:
    progress = Progress(str(run), "resolve-run", quiet=True)
    record_differences(progress, differences, since)
    progress.finish()
    record = read_step(LocalStorage(run), "resolve-run")
    assert record
    return record.detail


def test_differences_are_in_log_notes_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    found = {"gate.max_loss": (None, 3.0), "train.epochs": (5, 2)}
    detail = recorded(run, found, ["train.seed changed from 0 to 4"])
    said = capsys.readouterr().out
    for line in (
        "gate.max_loss is 3.0, compiled with none",
        "train.epochs is 2, compiled with 5",
        "train.seed changed",
    ):
        assert line in said and line in str(detail["notes"])
    assert "2 settings differ from the compiled pipeline" in said and "1 setting differs from the last start" in said
    page = build_report(str(run))
    assert "Settings that differ from the compiled pipeline" in page and "gate.max_loss" in page


def test_a_note_is_short_and_says_how_many_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {f"data.field{number}": (number, "\x1b[31m") for number in range(SHOWN_IN_NOTE + 3)}
    (note,) = recorded(tmp_path, found, [])["notes"]  # type: ignore[misc]
    said = capsys.readouterr().out
    assert note.endswith("; and 3 more, in the log") and said.count("compiled with") == SHOWN_IN_NOTE + 3
    assert "\x1b" not in said


def test_equal_settings_are_one_line_and_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded(tmp_path, {}, []) == {}
    assert capsys.readouterr().out == "the settings are those of the compiled pipeline\n"
