"""The step that watches a job on Vertex AI: lost answers, limits, stops, starts again, and the end of the program."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import pytest
from requests.exceptions import ConnectionError as NoConnection
from urllib3.exceptions import MaxRetryError, NameResolutionError

from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.capacity_fallback import RUN, RUNS, STOCKOUT, WAITS, climb, config, strategies, tried
from vlmpipe.config.sections.cluster import MAX_WATCHED_S
from vlmpipe.google_cloud import retries
from vlmpipe.platforms.vertex.jobs.capacity_fallback import CapacityFallback
from vlmpipe.platforms.vertex.jobs.run_labels import RUN_LABELS_VARIABLE, run_labels
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.storage import Storage
from vlmpipe.trainer.storage.records import write_record

pytest_plugins = ("tests.support.vertex.capacity_fallback",)


def test_a_job_is_watched_on_where_names_are_not_resolved_for_a_while(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    once, faults = retries.send_once, iter(range(6))

    def send(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if method.__name__ == "get_custom_job" and next(faults, None) is not None:
            unknown = NameResolutionError("host", cast(Any, None), socket.gaierror())
            raise NoConnection(MaxRetryError(cast(Any, None), "/", unknown))
        return once(method, *arguments, **named)

    monkeypatch.setattr(retries, "send_once", send)
    climb(server, run)
    assert tried(run) == [("spot", "done")] and next(faults, None) is None


def test_jobs_carry_the_labels_by_which_costs_are_assigned_to_the_run(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    billing = {"vertex-ai-pipelines-run-billing-id": "123", "vlmpipe-step": "theirs", "bad key": "x", "a": "Big"}
    monkeypatch.setenv(RUN_LABELS_VARIABLE, json.dumps(billing))
    server.custom_jobs.scripts = [[STOCKOUT], RUNS]
    climb(server, run)
    labels = [dict(job.labels) for job in server.custom_jobs.jobs.values()]
    assert [one["vertex-ai-pipelines-run-billing-id"] for one in labels] == ["123", "123"]
    assert labels[0]["vlmpipe-step"] == "train" and not {"bad key", "a"} & labels[0].keys()
    assert "left out: 'a', 'bad key'" in capsys.readouterr().out
    for broken in ("{", '["a"]'):
        monkeypatch.setenv(RUN_LABELS_VARIABLE, broken)
        assert run_labels() == {}
        assert "is no JSON object" in capsys.readouterr().out


def test_the_labels_are_those_of_googles_own_components(monkeypatch: pytest.MonkeyPatch) -> None:
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import gcp_labels_util

    assert gcp_labels_util.SYSTEM_LABEL_ENV_VAR == RUN_LABELS_VARIABLE
    monkeypatch.setenv(RUN_LABELS_VARIABLE, '{"a-b_c": "1", "d": ""}')
    assert run_labels() == gcp_labels_util.attach_system_labels()


def test_a_step_ends_before_vertex_ends_it_and_its_job_not_long_after(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    ended = server.custom_jobs.now + MAX_WATCHED_S

    def an_hour_passes(_: float) -> None:
        server.custom_jobs.now += 3600

    server.custom_jobs.sleep = an_hour_passes  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the pipeline's step that watches it must end after 166 h") as caught:
        climb(server, run, config("cluster.timeout=604800s"))
    (job,) = server.custom_jobs.jobs.values()
    timeout_s = job.job_spec.scheduling.timeout.total_seconds()
    assert caught.value.code == ExitCode.PREEMPTED and tried(run) == [("spot", "stopped")]
    assert MAX_WATCHED_S < timeout_s < 7 * 24 * 3600 and ended <= server.custom_jobs.now < ended + 2 * 3600


def test_a_shorter_timeout_of_the_run_file_stays(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [RUNS]
    climb(server, run, config("cluster.timeout=7200s"))
    (job,) = server.custom_jobs.jobs.values()
    assert job.job_spec.scheduling.timeout.total_seconds() == 7200


@pytest.mark.parametrize("action", ["drop_before", "drop_after"])
def test_a_lost_answer_starts_no_second_job(server: FakeVertex, run: Storage, action: Any) -> None:
    server.custom_jobs.scripts = [RUNS]
    server.faults.append(Fault(action))
    climb(server, run)
    assert len(server.custom_jobs.jobs) == 1


def test_a_job_of_which_no_answer_ever_came_is_watched_all_the_same(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [RUNS]
    server.faults += [Fault("drop_before", times=2), Fault("drop_after")]
    climb(server, run)
    assert len(server.custom_jobs.jobs) == 1 and tried(run) == [("spot", "done")]


def test_a_stop_before_the_answer_leaves_no_job_behind(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    server.faults.append(Fault("drop_after"))

    def stop(_: float) -> None:
        raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert sum(f"{job}:cancel" in request for request in server.requests) == 1


def test_a_job_that_cannot_be_cancelled_is_named(
    server: FakeVertex, run: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]

    def stop(_: float) -> None:
        server.faults.append(Fault("status", code=403, message="no permission"))
        raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert f"{job} could not be cancelled and may still run" in capsys.readouterr().out


def test_a_folder_that_can_no_longer_be_written_leaves_no_job_behind(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    write = type(run).write

    def write_no_job(self: Storage, name: str, data: bytes, **options: Any) -> Any:
        if b"customJobs" in data:
            raise UserError("the bucket is gone", code=ExitCode.UNAVAILABLE)
        return write(self, name, data, **options)

    monkeypatch.setattr(type(run), "write", write_no_job)
    with pytest.raises(UserError, match="the bucket is gone"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert sum(f"{job}:cancel" in request for request in server.requests) == 1


def test_a_step_that_begins_again_takes_up_the_job_it_left(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[STOCKOUT], RUNS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityFallback, "_watch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(CapacityFallback, "_abandon", lambda *_: None)  # killed, without a chance to cancel
        with pytest.raises(KeyboardInterrupt):
            climb(server, run)
    assert len(server.custom_jobs.jobs) == 1
    climb(server, run)
    assert tried(run) == [("spot", "no capacity"), ("flex_start", "done")]
    assert strategies(server) == ["SPOT", "FLEX_START"]
    run.write("run.json", run.read("run.json") + b"\n")  # the run is continued: it climbs anew
    server.custom_jobs.scripts = [RUNS]
    climb(server, run)
    assert tried(run) == [("spot", "done")]


def test_a_step_that_is_stopped_cancels_its_job(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    sleeps = iter(range(3))

    def sleep(_: float) -> None:
        if next(sleeps, None) is None:
            raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    assert sum(request.endswith(":cancel?%24alt=json%3Benum-encoding%3Dint") for request in server.requests) == 1


def test_the_server_refuses_a_job_that_the_api_would(server: FakeVertex) -> None:
    pool = {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": 1, "containerSpec": {"imageUri": "a/b:1"}}
    good = {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool]}}
    bad = [
        {**good, "strategy": "SPOT"},
        {**good, "state": "JOB_STATE_RUNNING"},
        {"displayName": "a"},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [{**pool, "replicaCount": 2}]}},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool], "scheduling": {"strategy": "FLEX_START"}}},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool], "scheduling": {"maxWaitDuration": "5s"}}},
    ]
    assert [_post(server, "customJobs", body) for body in [good, *bad]] == [200, *[400] * len(bad)]
    assert _post(server, "customJobs/1:cancel", {}) == 404


def _post(server: FakeVertex, path: str, content: object) -> int:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", f"/v1/projects/test-project/locations/us-central1/{path}", json.dumps(content))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_job_whose_program_has_ended_is_cancelled_and_training_is_done(server: FakeVertex, run: Storage) -> None:
    """As a launcher that is stopped, or a frozen container, after "train: done"."""
    record = StepRecord("train", "done", ended_s=server.custom_jobs.now + 5.0)
    write_record(run, "steps/train.json", asdict(record))
    server.custom_jobs.scripts = [[*WAITS, *[Step("RUNNING")] * 60]]
    climb(server, run)
    (job,) = server.custom_jobs.jobs.values()
    assert job.state.name in ("JOB_STATE_CANCELLED", "JOB_STATE_CANCELLING") and tried(run) == [("spot", "done")]
    (attempt,) = json.loads(run.read("capacity_fallback.json"))["attempts"]
    assert attempt["cancelled_for"] == "end" and "train has recorded its end" in attempt["why"]


def test_the_end_of_an_earlier_job_ends_no_later_one(server: FakeVertex, run: Storage) -> None:
    """A finished run that trains on: its record is the old one for as long as machines are waited for."""
    record = StepRecord("train", "done", ended_s=server.custom_jobs.now - 5.0)
    write_record(run, "steps/train.json", asdict(record))
    server.custom_jobs.scripts = [[*[Step("QUEUED")] * 60, *RUNS]]
    run.write("run.json", json.dumps(config("cluster.capacity_fallback=[]").to_run_json(RUN)).encode())
    climb(server, run, config("cluster.capacity_fallback=[]"))
    (job,) = server.custom_jobs.jobs.values()
    assert job.state.name == "JOB_STATE_SUCCEEDED"
