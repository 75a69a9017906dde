"""What surrounds a step's body: its record, its exit code, and the files it reads and writes."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.components.runtime.run_results import close_run, job_metrics
from vlmpipe.platforms.step_context import STOPPED_VARIABLE, exit_on_error, step_context
from vlmpipe.trainer.config.job import run_uri_of
from vlmpipe.trainer.errors import ConfigError, DataError


def record(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "steps/decide.json").read_text())
    return value


def test_a_step_that_ends_well_is_recorded_as_done(tmp_path: Path) -> None:
    with step_context(str(tmp_path), "decide"):
        assert record(tmp_path)["state"] == "running"
    assert record(tmp_path)["state"] == "done"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("no pictures", fix="add some"), 65, "no pictures"),
        (OSError(28, "No space left on device", "/data"), 73, "no space left while running decide: /data"),
    ],
)
def test_an_error_for_people_ends_the_step_with_its_code_and_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as ended, step_context(str(tmp_path), "decide"):
        raise error
    assert ended.value.code == code
    assert record(tmp_path)["state"] == "failed" and record(tmp_path)["message"] == message
    assert record(tmp_path)["detail"]["exit_code"] == code
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}\n") and "Traceback" not in shown


def test_a_traceback_is_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_DEBUG", "1")
    with pytest.raises(SystemExit), exit_on_error():
        raise ConfigError("wrong")
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_keeps_its_type_and_is_recorded_as_1(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), step_context(str(tmp_path), "decide"):
        _ = 1 / 0
    assert record(tmp_path)["detail"]["exit_code"] == 1


def test_sigterm_ends_a_step_as_resumable(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, step_context(str(tmp_path), "decide"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 75 and record(tmp_path)["message"] == "decide was stopped on request"
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_step_begins_after_a_request_to_stop_but_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOPPED_VARIABLE, "1")
    with pytest.raises(SystemExit) as ended, step_context(str(tmp_path), "train"):
        raise AssertionError("it began")
    assert ended.value.code == 75 and not (tmp_path / "steps/train.json").exists()
    with step_context(str(tmp_path), "decide", even_when_stopped=True):
        pass
    assert record(tmp_path)["state"] == "done"


def test_an_empty_run_id_takes_the_job_name() -> None:
    assert run_uri_of("gs://b/root/", "", "job-1") == "gs://b/root/runs/job-1"
    assert run_uri_of("gs://b/root", "mine", "job-1") == "gs://b/root/runs/mine"


def test_metrics_of_a_job_are_its_plain_numbers(tmp_path: Path) -> None:
    summary = {"steps": 3, "final_loss": 0.5, "resumed_from_step": None, "strategy": "ddp", "flag": True, "v": {"a": 1}}
    summary["perplexity"] = math.inf
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert job_metrics(str(tmp_path), "train") == {"steps": 3, "final_loss": 0.5}


def test_a_run_whose_run_file_was_refused_is_closed_without_a_report(tmp_path: Path) -> None:
    assert "there is no report" in close_run(str(tmp_path), "failed")
    assert not (tmp_path / "report.html").exists()
