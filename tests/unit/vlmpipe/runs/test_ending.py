"""How a run ended, for each word of a service and each state in which a run's records can be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from kfp.dsl.executor import Executor

from vlmpipe.components.notify import notify
from vlmpipe.runs.ending import Ending, ending_of
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import StepRecord

JOB = "training-run-7"
# What Vertex AI, Kubeflow (COMPLETE, RUNNING, CANCELED) and kfp.local say of a run that has ended.
WORDS = ("SUCCEEDED", "COMPLETE", "RUNNING", "FAILED", "CANCELLED", "CANCELED", "stopped")
Records = dict[str, tuple[str, float, dict[str, Any]]]  # step -> state, start in seconds, detail
BEGUN: Records = {"resolve-run": ("done", 10.0, {"job_name": JOB})}
ACCEPTED: Records = BEGUN | {"decide": ("done", 20.0, {"answer": "accepted"})}
RECORDS: dict[str, Records] = {
    "complete": ACCEPTED | {"register-model": ("done", 30.0, {})},
    "rejected": BEGUN | {"decide": ("done", 20.0, {"answer": "rejected"})},
    "failed": BEGUN | {"train": ("failed", 20.0, {"exit_code": 65}), "notify": ("running", 30.0, {})},
    "stopped": BEGUN | {"train": ("stopped", 20.0, {"exit_code": 75})},
    "without an end": BEGUN | {"train": ("running", 20.0, {})},
    "ended early": ACCEPTED,
    "none": {},
    "another job's": {
        "resolve-run": ("done", 10.0, {"job_name": "training-run-6"}), "register-model": ("done", 30.0, {}),
    },
    "an earlier attempt's": {"train": ("failed", 5.0, {}), "register-model": ("done", 6.0, {})} | BEGUN,
}  # fmt: skip
EXPECTED = {  # by word where they differ, else for all words but those of a request to stop
    "complete": dict.fromkeys(WORDS, "done"),
    "rejected": dict.fromkeys(WORDS, "done"),
    "stopped": dict.fromkeys(WORDS, "stopped") | {"FAILED": "failed"},
}
BY_REQUEST = ("CANCELLED", "CANCELED", "stopped")


def write(run: Path, records: Records) -> str:
    (run / "steps").mkdir(parents=True, exist_ok=True)
    for step, (state, started_s, detail) in records.items():
        record = StepRecord(step, state, started_s=started_s, message=f"{step} {state}", detail=detail)
        (run / f"steps/{step}.json").write_text(json.dumps(asdict(record)))
    return str(run)


def ending(run: str, word: str, last_step: str = "register-model", error: str = "") -> Ending:
    return ending_of(run, job_name=JOB, last_step=last_step, word=word, error=error)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("records", RECORDS)
def test_records_decide_and_the_services_word_only_what_they_leave_open(
    tmp_path: Path, records: str, word: str
) -> None:
    expected = EXPECTED.get(records, {}).get(word, "stopped" if word in BY_REQUEST else "failed")
    found = ending(write(tmp_path, RECORDS[records]), word)
    assert found.outcome == expected
    if records in ("failed", "stopped", "without an end"):
        assert found.step == "train"
    if expected == "failed":
        assert found.error, "a failure is never reported without a reason"
        assert bool(found.note) == (word in ("SUCCEEDED", "COMPLETE")), "the service's word is told where it disagrees"


def test_a_run_is_complete_only_with_the_last_step_of_its_graph(tmp_path: Path) -> None:
    run = write(tmp_path, RECORDS["complete"])
    found = ending(run, "SUCCEEDED", "deploy-model")
    assert (found.outcome, found.error) == ("failed", "the run ended after register-model, and no step recorded why")
    write(tmp_path, {"deploy-model": ("done", 40.0, {})})
    assert ending(run, "RUNNING", "deploy-model").outcome == "done"
    write(tmp_path / "sweep", BEGUN | {"compare-variants": ("done", 20.0, {})})
    assert ending(str(tmp_path / "sweep"), "RUNNING", "compare-variants").outcome == "done"


def test_a_failure_reported_after_the_last_step_is_told(tmp_path: Path) -> None:
    found = ending(write(tmp_path, RECORDS["complete"]), "FAILED")
    assert found.note == "the service reports FAILED, although register-model completed the run"


def test_the_services_message_is_the_reason_where_no_step_left_one(tmp_path: Path) -> None:
    assert ending(str(tmp_path), "FAILED", error="the image cannot be pulled").error == "the image cannot be pulled"
    assert ending(str(tmp_path), "RUNNING").error == "the run ended before any step began, and no step recorded why"


def test_steps_of_a_stage_are_its_own(tmp_path: Path) -> None:
    align = tmp_path / "stages/align"
    write(tmp_path, {"train": ("failed", 1.0, {})})  # of an earlier job: this one has not begun the last stage
    write(align, BEGUN | {"train": ("failed", 20.0, {})})
    assert ending(str(tmp_path), "RUNNING").step == "align-train"
    write(align, BEGUN | {"train": ("done", 20.0, {}), "decide": ("done", 30.0, {"answer": "rejected"})})
    (align / "decision.json").write_text('{"accepted": false, "reason": "loss 7 is above 6"}')
    (tmp_path / "registered.json").write_text('{"version": "9"}')  # of an earlier job
    found = ending(str(tmp_path), "RUNNING")
    assert (found.outcome, found.decision and found.decision.reason, found.version) == (
        "done",
        "loss 7 is above 6",
        None,
    )


def test_unreadable_records_leave_the_services_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_uri: str) -> None:
        raise UserError("no permission to read the bucket")

    monkeypatch.setattr("vlmpipe.runs.ending.open_storage", refuse)
    found = {word: ending(str(tmp_path), word) for word in ("COMPLETE", "RUNNING", "CANCELED")}
    assert {word: one.outcome for word, one in found.items()} == {
        "COMPLETE": "done", "RUNNING": "failed", "CANCELED": "stopped",
    }  # fmt: skip
    assert all("no permission to read the bucket" in one.note for one in found.values())


@pytest.mark.parametrize("word", ["COMPLETE", "RUNNING"])
def test_the_exit_handler_takes_what_kubeflow_passes_it(tmp_path: Path, word: str) -> None:
    """The form in which Kubeflow's driver passes a status: the state of a DAG, and an error that is always empty."""
    write(tmp_path / "runs/r1", RECORDS["complete"])
    status = {"state": word, "pipelineTaskName": "exit-handler-1", "pipelineJobResourceName": JOB, "error": {}}
    constants = {
        "run_id": "r1",
        "job_name": JOB,
        "root_uri": str(tmp_path),
        "webhook": "",
        "last_step": "register-model",
    }
    message = {
        "inputs": {"parameterValues": constants | {"status": status}},
        "outputs": {"outputFile": str(tmp_path / "output.json")},
    }
    Executor(message, notify).execute()
    record = json.loads((tmp_path / "runs/r1/steps/notify.json").read_text())
    assert (record["state"], record["message"]) == (
        "done", "run done: the run file was not accepted, so there is no report",
    )  # fmt: skip
