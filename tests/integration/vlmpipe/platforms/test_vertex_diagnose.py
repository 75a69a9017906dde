"""`vlmpipe diagnose` of runs on Vertex AI: Google's client, the strict fake, and the run's folder in a fake bucket."""

from __future__ import annotations

import pytest
from google.cloud.aiplatform_v1.types import JobState

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.runs import JOB, RUN, course, put, put_ladder, put_record
from tests.support.vertex.submit_runs import Submit
from vlmpipe.catalog.unproved import read_sightings
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.rehearsal.vertex.scripted_runs import BEGUN, TRAINING, Move
from vlmpipe.runs.submitted import RunRecord
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage

pytest_plugins = ("tests.support.vertex.fixtures",)

TEMPLATE = f"https://us-central1-kfp.pkg.dev/p/r/llava-7b-zero2-spot/sha256:{'0' * 64}"
REPLICA = "The replica workerpool0-0 exited with a non-zero status of {}."
LAUNCHER = "The container of the task exited with a non-zero status of 1."
STOCKOUT = "Resources are insufficient in region: us-central1. Please try a different region."
QUOTA = "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_a100_gpus"
REQUESTS = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute per region' of service 'a'"
ROLE = "Permission 'aiplatform.customJobs.create' denied on resource '//aiplatform.googleapis.com/projects/p'"
DRIVER = "CUDA driver version is insufficient for CUDA runtime version"
IMAGE = 'Failed to pull image "us-docker.pkg.dev/p/trainer@sha256:1": not found'


def train_fails(vertex: FakeVertex, custom_job: Step, task: str = LAUNCHER) -> None:
    """Training's custom job ends so; of the task the service says `task`, and of the pipeline that it failed."""
    failed = Move({"train": "FAILED", "notify": "RUNNING"}, error=task, custom_job=custom_job)
    over = Move({"notify": "SUCCEEDED"}, "FAILED", "The DAG failed because some tasks failed: [train].")
    course(vertex, *TRAINING, failed, over, begun=6)


# name: how training's custom job ends, what is said of the task; the finding and its exit code
CASES: dict[str, tuple[Step, str, str, int]] = {
    "no capacity": (Step("FAILED", 8, STOCKOUT), LAUNCHER, "vertex-stockout", 69),
    "a wait that is over": (Step("EXPIRED", 4, ""), LAUNCHER, "vertex-stockout", 69),
    "quota of machines": (Step("FAILED", 8, QUOTA), LAUNCHER, "vertex-quota", 69),
    "quota of requests": (Step("FAILED", 8, ""), REQUESTS, "vertex-requests", 69),
    "an image": (Step("FAILED", 3, IMAGE), LAUNCHER, "image", 69),
    "a role": (Step("FAILED", 7, ""), ROLE, "vertex-role", 77),
    "our exit code": (Step("FAILED", 9, REPLICA.format(65)), LAUNCHER, "bad-data", 65),
    "a signal": (Step("FAILED", 9, REPLICA.format(137)), LAUNCHER, "killed", 137),
    "cancelled by hand": (Step("CANCELLED", 1, "CANCELED"), LAUNCHER, "cancelled", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_in_the_services_own_messages(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, name: str
) -> None:
    custom_job, task, expected, code = CASES[name]
    train_fails(started, custom_job, task)
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["outcome"], found["step"], found["id"], found["exit_code"]) == ("failed", "train", expected, code)


@pytest.mark.parametrize(
    ("source", "template", "said"),
    [
        (("my file.yaml", "train.epochs=2"), "", f"vlmpipe submit 'my file.yaml' train.epochs=2 --run-id {JOB}"),
        ((), TEMPLATE, f"vlmpipe submit {TEMPLATE} --run-id {JOB}"),
        ((), "", f"submit the run file of llava-7b-zero2-spot again with --run-id {JOB}"),
    ],
    ids=["noted", "published", "not known"],
)
def test_the_continue_command_names_the_submitted_run_file(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, source: tuple[str, ...], template: str, said: str
) -> None:
    train_fails(started, Step("FAILED", 9, REPLICA.format(65)))
    started.jobs[RUN].template_uri = template
    if source:
        RunRecord(RUN, "gs://b/runs/r", 1.0, 3.0, source).write(JOB)
    assert f"  continue:  {said}" in vlmpipe("diagnose", RUN).out
    assert vlmpipe("diagnose", RUN, "--json").json["command"] == (said if source or template else None)
    assert f"  continue: {said}" in vlmpipe("status", RUN).out


def test_records_outrank_the_service_and_notes_show_the_progress(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    train_fails(started, Step("FAILED", 9, REPLICA.format(65)))
    error = "the loss of step 41 is nan\n  expected: a number\n  to do:    look at sample 7"
    put_record(bucket, "train", "failed", done=41, total=120, detail={"exit_code": 65, "error": error, "loss": 0.5})
    put(bucket, "checkpoints/0001-00000040-abc/COMMIT", {})
    put(bucket, "checkpoints/0001-00000041-def/node-0.json", {})  # not committed
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["id"], found["exit_code"], found["seen"]["where"]) == ("not-finite", 65, "steps/train.json")
    assert found["seen"]["line"] is None
    assert "training came to step 41 of 120, loss 0.500" in found["notes"]
    assert "a checkpoint at step 40 is saved, from which a resumed run continues" in found["notes"]
    said = vlmpipe("diagnose", RUN).out
    assert said.startswith(f"run {JOB}: failed in step train with exit code 65\n  cause:     the loss or a gradient")
    assert "  seen in:   steps/train.json: the loss of step 41" in said
    assert "  to do:     " in said and f"--run-id {JOB}" in said


def test_logs_say_it_where_nothing_else_does_and_a_missing_role_is_a_note(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    train_fails(started, Step("FAILED", 9, REPLICA.format(1)))
    job = started.jobs[RUN]
    started.print(job, "train", "step 7", replica="workerpool0-0")
    started.print(job, "train", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
                          replica="workerpool1-0")  # fmt: skip
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["id"], found["seen"]["where"]) == ("gpu-out-of-memory", "vlmpipe logs --step train, workerpool1-0")
    assert [one.split(" (")[0] for one in found["also"]] == ["a replica ended with an error"]
    started.faults.append(Fault("status", "POST", code=403, message="denied"))
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["id"], found["exit_code"]) == ("replica-exit", 1)
    assert any(note.startswith("the logs could not be read (roles/logging.viewer)") for note in found["notes"])


def test_a_missing_bucket_is_the_cause_where_no_step_could_say_it(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, BEGUN, Move({"resolve-run": "FAILED"}, "FAILED", REPLICA.format(64)), begun=2)
    assert vlmpipe("diagnose", RUN, "--json").json["id"] == "bad-config"  # by its code alone
    bucket.buckets.clear()
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["id"], found["seen"]["where"]) == ("bucket-missing", "the run's folder")


def test_a_cancelled_run_is_diagnosed_as_cancelled(started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit) -> None:
    course(started, *TRAINING, begun=4)
    started.print(started.jobs[RUN], "train", "stopped on request after step 5; resumable")
    vlmpipe("cancel", RUN)
    vlmpipe("status", RUN)
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["outcome"], found["id"], found["exit_code"], found["step"]) == ("stopped", "cancelled", 75, "train")


def test_a_training_that_was_stopped_for_money_names_the_rungs(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    train_fails(started, Step("FAILED", 9, REPLICA.format(1)))
    put_ladder(bucket, "spot", "standard", outcome="stopped", cancelled_for="spend")
    error = "training was stopped: cluster.max_spend_usd, $9.00, is reached"
    put_record(bucket, "train", "failed", detail={"exit_code": 75, "error": error})
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["id"], found["exit_code"]) == ("spend-limit", 75)
    assert "option spot: no capacity, $0.00: no machines within 600 s, job PENDING" in found["notes"]


def test_a_training_job_without_machines_is_shown_as_waiting(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    course(started, *TRAINING, begun=4)
    number = list(started.custom_jobs.jobs)[-1]
    started.custom_jobs.jobs[number].state = JobState.JOB_STATE_PENDING
    found = vlmpipe("diagnose", RUN, "--json").json
    assert (found["outcome"], found["cause"]) == ("running", "nothing yet: the run is still running")
    assert f"step train waits for machines: custom job {number[-4:]} is PENDING" in found["notes"]
    started.faults.append(Fault("status", "GET", code=403, message="denied"))
    assert vlmpipe("diagnose", RUN).code == 77  # the pipeline job itself


def test_what_a_run_shows_of_vertex_is_recorded_once_beside_the_runs(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    train_fails(started, Step("FAILED", 9, REPLICA.format(65)))
    notes = vlmpipe("diagnose", RUN, "--json").json["notes"]
    (seen,) = (note for note in notes if note.startswith("seen for the first time on Vertex AI: "))
    for name in ("vertex-accepts-the-graph", "vertex-joins-branches", "vertex-exit-task-runs"):
        assert name in seen
    root = open_storage("gs://example-bucket/vlmpipe")
    found = read_sightings(root)
    assert found["vertex-exit-task-runs"].holds and found["vertex-exit-task-runs"].run == JOB
    assert not any("seen for the first time" in note for note in vlmpipe("diagnose", RUN, "--json").json["notes"])


def test_a_failure_that_contradicts_an_assumption_is_told(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    put_record(bucket, "train", "failed", message=DRIVER, detail={"exit_code": 1, "error": DRIVER})
    train_fails(started, Step("FAILED", 9, REPLICA.format(1)))
    found = vlmpipe("diagnose", RUN, "--json").json
    assert found["id"] == "gpu-driver", found
    assert any("vertex-driver-runs-the-wheel is contradicted: the run failed" in note for note in found["notes"])


def test_what_cannot_be_recorded_is_a_note(
    started: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no permission to write gs://example-bucket")

    monkeypatch.setattr("vlmpipe.platforms.vertex.runs.first_contact.note_sightings", refuse)
    train_fails(started, Step("FAILED", 9, REPLICA.format(65)))
    notes = vlmpipe("diagnose", RUN, "--json").json["notes"]
    assert "what this run shows about Vertex AI was not recorded: no permission to write gs://example-bucket" in notes
