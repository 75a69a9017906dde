"""`vlmpipe status`, `cancel` and `logs` of runs on Vertex AI, with Google's client against the strict fake."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from google.auth.exceptions import RefreshError
from google.cloud.aiplatform_v1.types import PipelineJob

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.clock import replace_time
from tests.support.vertex.runs import JOB, LINK, RUN, course, put, put_ladder, put_record
from tests.support.vertex.submit_runs import Submit, submitter
from vlmpipe.platforms.vertex import run as vertex_run
from vlmpipe.rehearsal.vertex.scripted_runs import BEGUN, DONE, TRAINING, Move
from vlmpipe.runs import watch
from vlmpipe.runs.steps import Step
from vlmpipe.runs.submitted import RunRecord

pytest_plugins = ("tests.support.vertex.fixtures",)


def steps_of(answer: Any) -> dict[str, Step]:
    return {one["name"]: Step(**one) for one in answer.json["steps"]}


def test_a_run_under_way_shows_its_steps_progress_and_money(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, *TRAINING, begun=4)
    put_record(bucket, "train", done=30, total=120, unit="steps", detail={"loss": 0.5, "tokens_per_s": 51000.0})
    put_record(bucket, "cache-features", "reused", message="every image has features already")
    put(bucket, "plan.json", {"cost": {"usd": 400.0, "steps": [{"job": "train", "usd_per_hour": 36.0}]}})
    answer = vlmpipe("status", RUN, "--json")
    found = steps_of(answer)
    assert (answer.code, answer.json["outcome"], answer.json["exit_code"]) == (0, "running", None)
    assert [found[name].state for name in ("resolve-run", "prepare-data", "cache-features", "train", "evaluate")] == [
        "done", "done", "reused", "running", "waiting",
    ]  # fmt: skip
    assert found["prepare-data"].elapsed_s == pytest.approx(10)
    assert found["train"].started_s - found["prepare-data"].started_s == pytest.approx(70)
    assert answer.json["planned_usd"] == 400
    assert answer.json["spent_usd_at_most"] == pytest.approx(found["train"].elapsed_s / 100)
    said = vlmpipe("status", RUN).out
    for part in ("step 30/120 · loss 0.500 · 51k tokens/s", "of the $400 planned", LINK, f"vlmpipe cancel {RUN}"):
        assert part in said


@pytest.mark.parametrize("name", [RUN, LINK, "by note", "by flags"])
def test_a_run_has_several_names(started: FakeVertex, vlmpipe: Submit, name: str) -> None:
    if name == "by note":
        RunRecord(RUN, "gs://b/runs/r", time.time(), 3.0).write(JOB)
        assert f"vlmpipe status {JOB}" in vlmpipe("runs").out
    flags = ["--project", "test-project", "--location", "us-central1"] if name == "by flags" else []
    answer = vlmpipe("status", name if "/" in name else JOB, "--json", *flags)
    assert (answer.code, answer.json["resource_name"], answer.json["outcome"]) == (0, RUN, "waiting")


def test_the_rungs_of_a_ladder_are_shown_with_what_became_of_them(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, *TRAINING, begun=4)
    put_ladder(bucket, "spot", "flex_start", job="projects/p/locations/l/customJobs/9002")
    said = vlmpipe("status", RUN).out
    assert "  option      spot: no capacity, $0.00: no machines within 600 s, job PENDING\n" in said
    assert "  option      flex_start: under way, $9.50\n" in said
    answer = vlmpipe("status", RUN, "--json")
    assert [(one["strategy"], one["outcome"], one["usd"]) for one in answer.json["capacity_fallback"]] == [
        ("spot", "no capacity", 0.0), ("flex_start", "", 9.5),
    ]  # fmt: skip
    assert steps_of(answer)["train"].message == "spot: no capacity; flex_start: machines are being found or started"
    put(bucket, "run.json", {"of": "the next attempt"})
    assert vlmpipe("status", RUN, "--json").json["capacity_fallback"] is None


def test_shells_into_running_jobs_are_shown_where_the_run_file_allows_them(
    started: FakeVertex, vlmpipe: Submit, created: PipelineJob
) -> None:
    course(started, *TRAINING, begun=4)
    jobs = started.custom_jobs
    for number, folder in ((71, f"gs://example-bucket/vlmpipe/runs/{JOB}"), (72, "gs://example-bucket/vlmpipe/runs/b")):
        name = f"{started.parent}/customJobs/{number}"
        jobs.begin(name)
        jobs.jobs[name].labels["vlmpipe-step"] = "train"
        jobs.jobs[name].job_spec.base_output_directory.output_uri_prefix = folder
        jobs.jobs[name].web_access_uris["workerpool0-0"] = f"https://shell.example/{number}"
    assert "shell" not in vlmpipe("status", RUN).out, "the run file does not allow it"
    parameters = started.jobs[RUN].pipeline_spec["root"]["inputDefinitions"]["parameters"]
    run_file = json.loads(parameters["run_file"]["defaultValue"])
    run_file["gcp"]["enable_web_access"] = True
    parameters["run_file"]["defaultValue"] = json.dumps(run_file)
    assert "  shell       workerpool0-0: https://shell.example/71\n" in vlmpipe("status", RUN).out
    assert vlmpipe("status", RUN, "--json").json["web_access_uris"] == {"workerpool0-0": "https://shell.example/71"}
    started.faults.append(Fault("status", method="GET", code=403, message="no permission", times=1))
    started.faults[-1].matches = lambda method, path, body: "/customJobs?" in path  # type: ignore[method-assign]
    assert "note: addresses of shells are missing, because no permission" in vlmpipe("status", RUN).out


def test_a_failed_step_reports_its_own_error_and_code(started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit) -> None:
    failed = Move({"train": "FAILED", "notify": "RUNNING"}, error="The replica exited with a non-zero status of 1.")
    course(started, *TRAINING, failed, Move({"notify": "SUCCEEDED"}, "FAILED", "Job failed."), begun=6)
    put_record(
        bucket, "train", "failed", message="loss is nan",
        detail={"exit_code": 65, "error": "loss is nan\n  expected: a number\n  to do:    look at sample 7"},
    )  # fmt: skip
    answer = vlmpipe("status", RUN)
    assert (answer.code, "step train failed with exit code 65" in answer.out) == (0, True)
    assert "to do:    look at sample 7" in answer.out and "--run-id " + JOB in answer.out
    assert vlmpipe("status", RUN, "--watch", "--plain").code == 65


@pytest.mark.parametrize(
    ("words", "code", "to_do"),
    [
        ("The replica workerpool0-0 exited with a non-zero status of 65.", 65, ""),
        ("no usable Google Cloud credentials while reading gs://b/x", 1, "gcloud auth application-default login"),
        ("Something else.", 1, ""),
    ],
)
def test_without_a_record_the_services_message_is_used(
    started: FakeVertex, vlmpipe: Submit, words: str, code: int, to_do: str
) -> None:
    course(started, BEGUN, Move({"resolve-run": "FAILED"}, "FAILED", words), begun=2)
    answer = vlmpipe("status", RUN)
    assert words in answer.out and to_do in answer.out
    assert vlmpipe("status", RUN, "--json").json["exit_code"] == code


def test_without_the_runs_folder_the_other_fields_are_shown(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, *TRAINING, begun=4)
    bucket.buckets.clear()
    answer = vlmpipe("status", RUN)
    assert answer.code == 0 and "machines are being found or started" in answer.out
    assert "note: progress, messages and exit codes are missing, because the bucket of" in answer.out


def test_records_of_an_earlier_attempt_are_not_shown(started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit) -> None:
    course(started, *TRAINING, begun=4)
    put_record(bucket, "train", "done", started_s=time.time() - 7200, done=120, total=120)
    put(bucket, "decision.json", {"accepted": True, "reason": "of the attempt before"})
    answer = vlmpipe("status", RUN, "--json")
    assert (steps_of(answer)["train"].done, answer.json["decision"]) == (0, None)


def test_watching_shows_every_move_and_leaves_with_the_runs_code(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, *TRAINING, *DONE)
    put_record(bucket, "decide", "done")
    put(bucket, "decision.json", {"accepted": False, "reason": "exact match 0.1 is below 0.5"})
    answer = vlmpipe("status", RUN, "--watch", "--plain")
    lines = answer.out.splitlines()
    for line in ("resolve-run: running", "train: done", "register-model: skipped", "gate         exact match 0.1"):
        assert any(text.startswith(line) for text in lines), line
    assert answer.code == 0 and started.runs.moves[JOB] == []


def test_watching_outlives_a_service_that_is_silent_for_a_while(
    started: FakeVertex, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(started, BEGUN, Move({"resolve-run": "FAILED"}, "FAILED", "no"))
    started.faults.append(Fault("drop_before", method="GET", times=9999))
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if naps.count(77.0) == 2:
            started.faults.clear()

    monkeypatch.setattr(watch, "SERVICE_POLL_S", 77.0)
    replace_time(monkeypatch, watch, sleep=nap)
    answer = vlmpipe("status", RUN, "--watch", "--plain")
    assert (answer.code, answer.out.count("no answer, trying again")) == (1, 1)


def test_leaving_the_watch_leaves_the_run_alone(
    started: FakeVertex, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    replace_time(monkeypatch, watch, sleep=interrupt)
    answer = vlmpipe("status", RUN, "--watch", "--plain")
    assert (answer.code, "the run continues" in answer.err) == (130, True)
    assert not any("cancel" in request for request in started.requests)


def test_a_submitted_run_is_watched(
    vertex: FakeVertex,
    bucket: FakeGcs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vlmpipe.platforms.vertex.submit.job_id_at", lambda config, moment: JOB)
    vertex.runs.moves[JOB] = [BEGUN, Move({"resolve-run": "FAILED"}, "FAILED", "a non-zero status of 64")]
    submit = submitter(tmp_path, monkeypatch, capfd, "submit")
    answer = submit("--plain")
    assert (answer.code, "resolve-run: running" in answer.out) == (64, True)
    assert answer.out.startswith(f"{JOB} is started on Vertex AI")
    assert len(vertex.jobs) == 1


def test_a_cancelled_run_is_over_as_stopped(started: FakeVertex, vlmpipe: Submit) -> None:
    course(started, *TRAINING, begun=4)
    assert vlmpipe("cancel", RUN).code == 0
    again = vlmpipe("cancel", RUN)
    assert (again.code, "stopping already" in " ".join(again.out.split())) == (0, True)
    answer = vlmpipe("status", RUN, "--watch", "--json")
    assert (answer.code, answer.json["outcome"], steps_of(answer)["train"].state) == (75, "stopped", "stopped")


def test_a_lost_answer_to_a_cancellation_is_not_a_failure(started: FakeVertex, vlmpipe: Submit) -> None:
    course(started, BEGUN, begun=1)
    started.faults.append(Fault("drop_after", method="POST"))
    assert vlmpipe("cancel", RUN).code == 0


def test_a_run_that_is_over_cannot_be_cancelled(started: FakeVertex, vlmpipe: Submit) -> None:
    course(started, BEGUN, Move({"resolve-run": "SUCCEEDED"}, "SUCCEEDED"), begun=2)
    answer = vlmpipe("cancel", RUN)
    assert (answer.code, "nothing to cancel" in answer.err) == (64, True)
    assert not any(":cancel" in request for request in started.requests)


def test_logs_are_those_of_the_step_and_in_order(started: FakeVertex, vlmpipe: Submit) -> None:
    course(started, *TRAINING, begun=4)
    job = started.jobs[RUN]
    started.print(job, "resolve-run", "run file is valid")
    started.print(job, "train", *(f"step {number}" for number in range(8)))
    whole = vlmpipe("logs", RUN)
    texts = [line.split("] ", 1)[1] for line in whole.out.splitlines()]
    assert (whole.code, texts) == (0, ["run file is valid", *(f"step {number}" for number in range(8))])
    assert "[train workerpool0-0] step 7" in whole.out
    last = vlmpipe("logs", RUN, "--step", "train", "--last", "4")
    assert [line[-6:] for line in last.out.splitlines()] == ["step 4", "step 5", "step 6", "step 7"]
    newest = json.loads(vlmpipe("logs", RUN, "--last", "1", "--json").out)
    assert newest.pop("time").startswith("20")
    assert newest == {"step": "train", "process": "workerpool0-0", "text": "step 7"}


def test_following_logs_prints_each_line_once_until_the_end(
    started: FakeVertex, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(started, *TRAINING, begun=4)
    started.print(started.jobs[RUN], "train", "step 0", "step 1")

    def go_on(seconds: float) -> None:
        started.print(started.jobs[RUN], "train", "step 2", "step 3")
        course(started, Move({"train": "FAILED"}, "FAILED", "no"))

    replace_time(monkeypatch, vertex_run, sleep=go_on)
    answer = vlmpipe("logs", RUN, "--follow", "--last", "1")
    assert [line[-6:] for line in answer.out.splitlines()] == ["step 1", "step 2", "step 3"]


def test_logs_of_a_step_that_has_not_begun_say_so(started: FakeVertex, vlmpipe: Submit) -> None:
    answer = vlmpipe("logs", RUN, "--step", "train")
    assert (answer.code, "has started no machine yet" in answer.err) == (64, True)


FAULTS = {
    "unknown run": (RUN + "-2", None, 66, "give its resource name"),
    "unknown job by flags": ("no-such-job", None, 66, "console.cloud.google.com"),
    "wrong region": (RUN.replace("us-central1", "europe-west4"), None, 64, "correct gcp.project and gcp.location"),
    "other project": (RUN.replace("test-", "other-"), None, 77, "add-iam-policy-binding other-project"),
    "missing role": (RUN, Fault("status", "GET", code=403, message="denied"), 77, "--role=roles/aiplatform.viewer"),
    "login refused": (RUN, Fault("status", "GET", code=401), 67, "gcloud auth application-default login"),
    "login run out": (RUN, RefreshError("Reauthentication is needed."), 67, "gcloud auth application-default login"),
    "no answer": (RUN, Fault("drop_before", "GET", times=9999), 69, "try again"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_keeps_a_run_from_being_seen_has_words_a_command_and_a_code(
    started: FakeVertex, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, fault, code, said = FAULTS[name]
    if isinstance(fault, Fault):
        started.faults.append(fault)
    elif fault:

        def refuse(*_: object, **__: object) -> None:
            raise fault

        monkeypatch.setattr("google.auth.credentials.AnonymousCredentials.before_request", refuse)
    flags = [] if "/" in run else ["--project", "test-project", "--location", "us-central1"]
    answer = vlmpipe("status", run, *flags)
    assert (answer.code, answer.out, said in answer.err) == (code, "", True), answer.err
    assert "Traceback" not in answer.err


def test_a_name_that_nothing_knows_is_looked_for_nowhere(vertex: FakeVertex, vlmpipe: Submit) -> None:
    answer = vlmpipe("status", "no-such-run")
    assert (answer.code, "--project" in answer.err, vertex.requests) == (66, True, [])


def test_logs_need_their_own_role(started: FakeVertex, vlmpipe: Submit) -> None:
    course(started, BEGUN, begun=1)
    started.faults.append(Fault("status", "POST", code=403, message="denied"))
    answer = vlmpipe("logs", RUN)
    assert (answer.code, "--role=roles/logging.viewer" in answer.err) == (77, True)
