"""A job that is cancelled makes none of the moves that its script still had, whatever its task was doing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

from vlmpipe.rehearsal.vertex import scripted_runs
from vlmpipe.rehearsal.vertex.scripted_runs import Move, ScriptedRuns


@pytest.mark.parametrize("made", range(4))
def test_a_cancelled_job_ends_at_its_next_moment(made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_runs, "tasks_of", lambda _job: {"prepare": {}, "decide": {}})
    runs: Any = ScriptedRuns("p", SimpleNamespace(begin=lambda *_: None, end=lambda *_: None))  # type: ignore[arg-type]
    job = PipelineJob(name="projects/p/locations/l/pipelineJobs/a")
    runs.begin(job)
    steps = [{"prepare": "PENDING"}, {"prepare": "RUNNING"}, {"prepare": "SUCCEEDED", "decide": "RUNNING"}]
    runs.moves["a"] = [*map(Move, steps), Move({"decide": "SUCCEEDED"}, "SUCCEEDED")]
    for _ in range(made):
        runs.advance(job)
    runs.cancel(job, SimpleNamespace(require_fields=lambda: None))
    for _ in range(3):
        runs.advance(job)
    assert job.state.name == "PIPELINE_STATE_CANCELLED" and job.end_time
    states = {task.task_name: PipelineTaskDetail.State(task.state).name for task in job.job_detail.task_details}
    assert set(states.values()) <= {"SUCCEEDED", "CANCELLED"} and not runs.moves.get("a")
