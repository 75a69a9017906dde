"""A run of several stages on Vertex AI: its steps from the service's tasks, its money from the plans of all stages."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import PipelineJob

from vlmpipe.google_cloud.client import Place
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.platforms.vertex.runs.status import VertexStatus, status_of
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

BEGAN_S = 1_000_000
STEPS = ("resolve-run", "prepare-data", "cache-features", "train", "sync-checkpoint", "evaluate", "decide")


def status(root: Path, states: dict[str, str], *, job_state: str = "RUNNING") -> VertexStatus:
    """Of the run r1, whose stages are align and finetune; `states` are those of its tasks, several of a name apart by
    blanks."""
    run_file = json.dumps({"stages": [{"name": "align"}, {"name": "finetune"}]})
    root_uri = {"runtimeValue": {"constant": str(root)}}
    spec: dict[str, Any] = {
        "root": {
            "inputDefinitions": {"parameters": {"run_file": {"defaultValue": run_file}}},
            "dag": {"tasks": {"notify": {"inputs": {"parameters": {"root_uri": root_uri}}}}},
        }
    }
    tasks = [
        {"task_name": name, "state": state, "start_time": {"seconds": BEGAN_S}, "end_time": {"seconds": BEGAN_S + 3600}}
        for name, words in states.items()
        for state in words.split()
    ]
    job = PipelineJob(
        name="projects/p/locations/l/pipelineJobs/r1",
        state=f"PIPELINE_STATE_{job_state}",
        pipeline_spec=spec,
        create_time={"seconds": BEGAN_S},
        job_detail={"task_details": tasks},
    )
    return status_of(Address(Place("p", "l"), "r1"), job, now_s=BEGAN_S + 7200)


def put(root: Path, name: str, content: dict[str, Any]) -> None:
    write_record(LocalStorage(root / "runs/r1"), name, content)


def states_of(found: VertexStatus) -> dict[str, str]:
    return {step.title: step.state for step in found.state.steps}


def test_the_steps_of_each_stage_have_its_tasks_and_records(tmp_path: Path) -> None:
    record = StepRecord("train", "running", started_s=BEGAN_S, done=30, total=120, detail={"loss": 0.5})
    put(tmp_path, "steps/train.json", asdict(record))
    tasks = {f"align-{name}": "SUCCEEDED" for name in STEPS} | {"finetune-train": "RUNNING"}
    found = status(tmp_path, tasks)
    assert found.state.stage == "finetune" and found.state.metrics == {"loss": 0.5}
    states = states_of(found)
    assert (states["align-train"], states["finetune-train"], states["finetune-evaluate"]) == (
        "done",
        "running",
        "waiting",
    )
    assert found.state.step("train").done == 30


def test_money_is_that_of_all_stages(tmp_path: Path) -> None:
    for folder, rate, usd in (("stages/align/", 10.0, 20.0), ("", 40.0, 300.0)):
        cost = {"usd": usd, "steps": [{"job": "train", "usd_per_hour": rate}]}
        put(tmp_path, f"{folder}plan.json", {"cost": cost})
    found = status(tmp_path, {"align-train": "SUCCEEDED", "finetune-train": "SUCCEEDED"})
    assert found.planned_usd == 320
    assert found.spent_usd == pytest.approx(50)  # an hour each


def test_a_plan_that_cannot_be_read_is_no_silent_lack_of_prices(tmp_path: Path) -> None:
    put(tmp_path, "stages/align/plan.json", {"cost": {"usd": "dear"}})
    put(tmp_path, "plan.json", {"cost": {"usd": 300.0}})
    (tmp_path / "runs/r1/evaluate.json").write_text("{half", encoding="utf-8")
    put(tmp_path, "steps/decide.json", asdict(StepRecord("decide", "done", BEGAN_S)))
    notes = status(tmp_path, {"align-train": "SUCCEEDED", "finetune-train": "SUCCEEDED"}).lines()
    assert "note: stage align: plan.json is not of this version of vlmpipe, by cost.usd" in notes
    assert "note: stage finetune: evaluate.json is damaged" in notes


def test_a_failed_step_is_named_with_its_stage(tmp_path: Path) -> None:
    error = {"exit_code": 65, "error": "loss is nan"}
    put(tmp_path, "stages/align/steps/train.json", asdict(StepRecord("train", "failed", BEGAN_S, detail=error)))
    found = status(tmp_path, {"align-resolve-run": "SUCCEEDED", "align-train": "FAILED"}, job_state="FAILED")
    assert found.exit_code == 65
    lines = found.lines()
    assert lines[0] == "error: step align-train failed with exit code 65: run r1"
    assert any("vlmpipe logs" in line and line.endswith("--step align-train") for line in lines)


def test_a_rejected_stage_is_the_runs_result(tmp_path: Path) -> None:
    put(tmp_path, "stages/align/steps/decide.json", asdict(StepRecord("decide", "done", BEGAN_S)))
    put(tmp_path, "stages/align/decision.json", {"accepted": False, "reason": "loss 7 is above 6"})
    tasks = {f"align-{name}": "SUCCEEDED" for name in STEPS} | {"finetune-resolve-run": "NOT_TRIGGERED"}
    found = status(tmp_path, tasks, job_state="SUCCEEDED")
    assert found.as_json()["decision"]["accepted"] is False
    assert "stage align          loss 7 is above 6" in found.lines()
    assert states_of(found)["finetune-train"] == "skipped"


def test_a_stage_that_an_earlier_attempt_finished_is_reused(tmp_path: Path) -> None:
    tasks = {"align-resolve-run": "SUCCEEDED", "align-train": "NOT_TRIGGERED", "align-decide": "SUCCEEDED"}
    found = status(tmp_path, {**tasks, "finetune-resolve-run": "RUNNING"})
    assert (states_of(found)["align-train"], found.state.stage) == ("reused", "finetune")


def test_a_sweep_s_jobs_are_one_step_with_the_sum_of_their_trainings(tmp_path: Path) -> None:
    for number, (state, done) in enumerate([("done", 3), ("running", 1), ("running", 2)]):
        record = StepRecord(f"train-variants-{number}", state, started_s=BEGAN_S, done=done, total=3, unit="trainings")
        put(tmp_path, f"steps/train-variants-{number}.json", asdict(record))
    tasks = {f"align-{name}": "SUCCEEDED" for name in STEPS} | {
        "finetune-resolve-run": "SUCCEEDED",
        "finetune-open-sweep": "SUCCEEDED",
        "finetune-prepare-data": "SUCCEEDED SUCCEEDED",
        "finetune-train-variants": "SUCCEEDED RUNNING PENDING",
    }
    found = status(tmp_path, tasks)
    states = states_of(found)
    assert (states["finetune-prepare-data"], states["finetune-train-variants"]) == ("done", "running")
    assert states["finetune-compare-variants"] == "waiting"
    assert "finetune-train" not in states and "register-model" not in states
    (step,) = [one for one in found.state.steps if one.name == "train-variants"]
    assert (step.done, step.total) == (6, 9)
    assert found.spent_usd is None  # tasks of one name run side by side


def test_a_sweep_that_is_over_shows_its_comparison(tmp_path: Path) -> None:
    score = {"value": 0.5, "interval": [0.4, 0.6]}
    one = {"name": "a", "starts": 1, "score": score, "selection": None, "verdict": "", "errors": []}
    comparison = {"metric": "exact_match", "questions": 9, "baseline": "a", "variants": [one], "hypotheses": []}
    put(tmp_path, SweepComparison.FILE, comparison)
    put(tmp_path, "steps/compare-variants.json", asdict(StepRecord("compare-variants", "done", started_s=BEGAN_S)))
    tasks = {f"align-{name}": "SUCCEEDED" for name in STEPS} | {
        "finetune-open-sweep": "SUCCEEDED", "finetune-compare-variants": "SUCCEEDED", "notify": "SUCCEEDED",
    }  # fmt: skip
    found = status(tmp_path, tasks, job_state="SUCCEEDED")
    assert any("a  0.500 (0.400 to 0.600)" in line for line in found.lines())
    assert found.as_json()["comparison"]["baseline"] == "a"


@pytest.mark.parametrize("minutes", [5, 25])
def test_a_job_that_goes_on_after_its_program_is_said(tmp_path: Path, minutes: int) -> None:
    now_s = BEGAN_S + 7200
    put(tmp_path, "steps/train.json", asdict(StepRecord("train", "done", BEGAN_S, now_s - 60 * minutes)))
    found = status(tmp_path, {"finetune-train": "RUNNING"})
    message = next(step.message for step in found.state.steps if step.title == "finetune-train")
    assert ("its program ended 25 min ago and its job has not" in message) is (minutes == 25)
