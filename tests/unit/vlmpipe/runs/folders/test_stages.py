"""A local run of several stages, from its files: which step of which stage, its logs, where a stopped run continues."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from vlmpipe.cli.runs.watching import leave
from vlmpipe.platforms.local.control import log_files, read_logs
from vlmpipe.runs.folders.diagnose import diagnose_folder
from vlmpipe.runs.folders.file_check import check_files
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.state import read_state
from vlmpipe.runs.folders.summary import report_of
from vlmpipe.runs.live_view import PlainView
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import OF_THE_RUN, OPTIONAL, STEPS
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

BEGAN_S = 1000.0
OF_A_STAGE = [name for name in STEPS if name not in (*OF_THE_RUN, *OPTIONAL)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of the stages align and finetune; nothing has begun."""
    folder = tmp_path / "runs/r1"
    content = {"stages": [{"name": "align"}, {"name": "finetune"}], "data": {"source": "mine.json"}}
    write_record(LocalStorage(folder), "run_file.json", content)
    marked(folder, None)
    return folder


def marked(run: Path, exit_code: int | None) -> None:
    Marker("r1", "d", ("c.yaml",), BEGAN_S, BEGAN_S + 60, exit_code).write(run)


def record(folder: Path, *steps: str, state: str = "done", began_s: float = BEGAN_S, **fields: object) -> None:
    for number, step in enumerate(steps):
        content = asdict(StepRecord(step, state, started_s=began_s + number, **fields))  # type: ignore[arg-type]
        write_record(LocalStorage(folder), f"steps/{step}.json", content | {"ended_s": began_s + number + 1})


def decided(folder: Path, *, accepted: bool) -> None:
    reason = "Accepted: it is good." if accepted else "Rejected: loss 7 is above 6."
    write_record(LocalStorage(folder), "decision.json", {"accepted": accepted, "reason": reason})


def state_of(run: Path, since_s: float = BEGAN_S) -> RunState:
    return read_state(run, now_s=BEGAN_S + 30, since_s=since_s)


def test_steps_begin_with_their_stages_name_as_in_the_pipeline(run: Path) -> None:
    titles = [step.title for step in state_of(run).steps]
    assert titles == [
        *(f"align-{name}" for name in OF_A_STAGE),
        *(f"finetune-{name}" for name in OF_A_STAGE),
        *(name for name in OF_THE_RUN if name not in OPTIONAL),
    ]


def test_progress_is_that_of_the_stage_under_way(run: Path) -> None:
    align = run / "stages/align"
    record(align, *OF_A_STAGE)
    (align / "metrics.jsonl").write_text(json.dumps({"step": 9, "loss": 9.0}) + "\n")
    record(run, "resolve-run", "prepare-data", "cache-features")
    record(run, "train", state="running", done=3, total=10)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.5}) + "\n")
    state, lines = state_of(run), list[str]()
    assert (state.stage, state.step("train").done, state.metrics["loss"]) == ("finetune", 3, 0.5)
    PlainView(lines.append).update(state)
    assert any(line.startswith("align-train: done") for line in lines)
    assert any(line.startswith("finetune-train: running. step 3/10 · loss 0.500") for line in lines)


def test_a_run_killed_between_stages_says_where_it_continues(run: Path) -> None:
    record(run / "stages/align", *OF_A_STAGE)
    decided(run / "stages/align", accepted=True)
    report = report_of(run)
    assert report.outcome == "stopped"
    assert report.lines()[:2] == [
        "Stopped: run r1",
        "  done and not trained again: stage align; it continues in stage finetune",
    ]


def test_a_stage_accepted_in_an_earlier_attempt_is_reused(run: Path) -> None:
    record(run / "stages/align", *OF_A_STAGE)
    later = BEGAN_S + 20
    record(run / "stages/align", "resolve-run", began_s=later)
    waiting = state_of(run, since_s=later).step("train")
    assert (waiting.title, waiting.state) == ("align-train", "waiting")
    record(run / "stages/align", "decide", began_s=later + 1)
    state = state_of(run, since_s=later)
    states = [step.state for step in state.steps if step.stage == "align"]
    assert states == ["done", *["reused"] * (len(OF_A_STAGE) - 2), "done"]
    assert state.stage == "finetune"


def test_a_rejected_stage_is_the_runs_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    align = run / "stages/align"
    record(align, *OF_A_STAGE)
    record(run, "notify")
    write_record(LocalStorage(align), "evaluate.json", {"exact_match": 0.1, "questions": 50})
    decided(align, accepted=False)
    marked(run, 0)
    report = report_of(run)
    assert report.outcome == "done" and report.as_json()["decision"]["accepted"] is False
    lines = report.lines()
    assert "stage align          Rejected: loss 7 is above 6." in lines
    assert "stage finetune       not begun" in lines
    with pytest.raises(UserError, match="the gate rejected the model"):
        leave(report, fail_on_reject=True)


def test_logs_of_a_stages_step_are_named_by_both(run: Path) -> None:
    for folder, line in ((run / "stages/align", "first"), (run, "second")):
        (folder / "logs/train").mkdir(parents=True)
        (folder / "logs/train/pool0-0.log").write_text(f"{line}\n")
    for step, text in (("align-train", "first"), ("finetune-train", "second")):
        (line,) = read_logs(log_files(run, step), step=step, last=0)
        assert (line.step, line.text) == (step, text)
    with pytest.raises(UserError, match="one of align-train, finetune-train"):
        log_files(run, "train")


def test_a_failure_is_diagnosed_in_its_stage(run: Path) -> None:
    align = run / "stages/align"
    error = "no space left while writing x"
    record(align, "resolve-run")
    record(align, "train", state="failed", message=error, detail={"exit_code": 73, "error": error})
    marked(run, 73)
    assert report_of(run).lines()[0] == "error: step align-train failed with exit code 73: run r1"
    found = diagnose_folder(run)
    assert (found.step, found.exit_code) == ("align-train", 73)
    (run / "run_file.json").unlink()  # a folder that was downloaded from a bucket
    assert diagnose_folder(run).step == "align-train"


def test_files_of_all_stages_are_checked(run: Path) -> None:
    record(run / "stages/align", "train")
    assert [check.part for check in check_files(str(run)) if check.problem] == []
    path = run / "stages/align/steps/train.json"
    path.write_bytes(path.read_bytes().replace(b"done", b"gone"))
    assert [check.part for check in check_files(str(run)) if check.problem] == ["align: records"]


def test_steps_that_most_runs_lack_are_shown_once_they_begin(run: Path) -> None:
    def shown() -> set[str]:
        return {step.name for step in read_state(run, now_s=BEGAN_S).steps}

    assert shown().isdisjoint(OPTIONAL) and shown() == set(STEPS) - set(OPTIONAL)
    record(run, *OPTIONAL, state="running")
    assert shown() == set(STEPS)
