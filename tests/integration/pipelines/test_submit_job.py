"""`vlmpipe submit --only train` and `--job-spec FILE`, with Google's client against the strict local server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform_v1 import types as api

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.pipelines.job_specs import CLUSTER
from tests.support.trainer.tiny_runs import TINY, merged
from tests.support.vertex.submit_runs import CHEAP, CONFIG, MINE, Submit
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.build import job_spec
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.pipelines import submit_job
from vlmpipe.platforms.vertex.jobs import custom_job
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.runs import submitted
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage

pytest_plugins = ("tests.support.vertex.fixtures",)
FLAGS = ["--project", "test-project", "--location", "us-central1"]
RUN_URI = "gs://example-bucket/vlmpipe/runs/r1"
ONLY = [CONFIG, "--only", "train", MINE, "cluster.scheduling_strategy=spot", "--run-id", "r1"]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, bucket: FakeGcs) -> FakeGcs:
    """A run whose data is prepared, without the source of this run file and without the planner."""

    def resolve(run_file: str, compiled: str, *, run_id: str) -> Any:
        config = load_run_file(CONFIG, [MINE])
        return type("Resolved", (), {"config": config})

    monkeypatch.setattr(submit_job, "_of_training", lambda config: CHEAP)
    monkeypatch.setattr(submit_job, "resolve", resolve)
    monkeypatch.setattr(submit_job, "_point_to_data", lambda run_json: None)
    return bucket


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return path


def only_job(vertex: FakeVertex) -> api.CustomJob:
    (job,) = vertex.custom_jobs.jobs.values()
    return job


def test_training_alone_is_the_job_that_the_pipeline_would_start(
    vertex: FakeVertex, prepared: FakeGcs, vlmpipe: Submit
) -> None:
    answer = vlmpipe("submit", *ONLY, "--detach", "--json")
    assert answer.code == 0, answer.err
    job, config = only_job(vertex), load_run_file(CONFIG, [MINE])
    assert job.job_spec == parse_job_spec(job_spec(config, "train", RUN_URI))
    assert job.display_name == "llava-7b-zero2-spot-train" and job.labels["vlmpipe-step"] == "train"
    assert answer.json["resource_name"] == job.name and answer.json["run_uri"] == RUN_URI
    assert not vertex.jobs, "no pipeline"


def test_a_job_alone_is_watched_and_known_by_its_number(vertex: FakeVertex, prepared: FakeGcs, vlmpipe: Submit) -> None:
    vertex.custom_jobs.scripts = [[Step("PENDING"), Step("RUNNING"), Step("RUNNING")]]
    vlmpipe("submit", *ONLY, "--detach")
    number = only_job(vertex).name.rpartition("/")[2]
    assert vlmpipe("status", number, "--json").json["outcome"] == "waiting"
    only_job(vertex).web_access_uris["workerpool0-0"] = "https://shell.example/0"
    answer = vlmpipe("status", number, "--json").json
    assert (answer["outcome"], answer["steps"][0]["name"], answer["exit_code"]) == ("running", "train", None)
    assert "  shell       workerpool0-0: https://shell.example/0" in vlmpipe("status", number).out
    assert f"vlmpipe status {number}" in vlmpipe("runs").out
    assert vlmpipe("cancel", number, "--json").json == {"run_id": number, "asked": True}
    assert vlmpipe("status", number, "--watch", "--plain").code == ExitCode.PREEMPTED
    again = vlmpipe("cancel", number)
    assert "stopping already, or stopped" in again.out
    refused = vlmpipe("diagnose", number)
    assert (refused.code, "a custom job without a pipeline" in refused.err) == (64, True)


def test_a_job_that_fails_leaves_with_its_exit_code_and_its_log(
    vertex: FakeVertex, spec_file: Path, vlmpipe: Submit
) -> None:
    failed = Step("FAILED", 3, "The replica workerpool0-0 exited with a non-zero status of 65.")
    vertex.custom_jobs.scripts = [[Step("RUNNING"), failed]]
    answer = vlmpipe("submit", "--job-spec", str(spec_file), *FLAGS, "--yes", "--plain")
    assert answer.code == 65 and "failed with exit code 65" in answer.out
    job = only_job(vertex)
    vertex.runs.entries.append(
        {
            "insertId": "a",
            "timestamp": job.create_time.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "resource": {
                "type": "ml_job",
                "labels": {"job_id": job.name.rpartition("/")[2], "task_name": "workerpool0-0"},
            },
            "textPayload": "loss 0.5",
        }
    )
    assert vlmpipe("logs", job.name, "--json").json["text"] == "loss 0.5"


def test_a_spec_arrives_as_the_sdk_sends_it(
    vertex: FakeVertex, spec_file: Path, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlmpipe("submit", "--job-spec", str(spec_file), *FLAGS, "--yes", "--detach")
    ours = only_job(vertex)
    vertex.custom_jobs.jobs.clear()
    aiplatform.init(
        project="test-project",
        location="us-central1",
        staging_bucket="gs://example-bucket",
        credentials=AnonymousCredentials(),
        api_endpoint=vertex.endpoint,
        api_transport="rest",
    )
    theirs = aiplatform.CustomJob(
        display_name="mine",
        worker_pool_specs=CLUSTER["worker_pool_specs"],
        base_output_dir=CLUSTER["base_output_directory"]["output_uri_prefix"],
    )
    theirs.submit(service_account=CLUSTER["service_account"], timeout=86400, restart_job_on_worker_restart=True)
    assert ours.job_spec == only_job(vertex).job_spec and ours.display_name == "mine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"network": "default"}, "VP502"),
        ({"use_spot": True}, "VP101"),
        ({"persistent_resource_id": "projects/p/x"}, "VP408"),
    ],
)
def test_a_spec_that_breaks_a_rule_is_not_sent(
    vertex: FakeVertex, spec_file: Path, vlmpipe: Submit, change: dict[str, Any], words: str
) -> None:
    spec_file.write_text(yaml.safe_dump({**CLUSTER, **change}), encoding="utf-8")
    answer = vlmpipe("submit", "--job-spec", str(spec_file), *FLAGS, "--yes")
    assert (answer.code, words in answer.err, vertex.requests) == (64, True, [])


def test_a_whole_job_keeps_its_name_labels_and_place(vertex: FakeVertex, spec_file: Path, vlmpipe: Submit) -> None:
    job = {
        "name": "projects/test-project/locations/us-central1/customJobs/1",
        "displayName": "theirs",
        "labels": {"team": "vision"},
        "jobSpec": json.loads(api.CustomJobSpec.to_json(parse_job_spec(CLUSTER), use_integers_for_enums=False)),
    }
    spec_file.write_text(json.dumps(job), encoding="utf-8")
    answer = vlmpipe("submit", "--job-spec", str(spec_file), "--yes", "--detach")
    assert answer.code == 0, answer.err
    sent = only_job(vertex)
    assert (sent.display_name, sent.labels["team"]) == ("theirs", "vision")
    assert sent.job_spec == parse_job_spec(CLUSTER)


def test_what_cannot_be_sent_is_said_before_anything_is(vertex: FakeVertex, spec_file: Path, vlmpipe: Submit) -> None:
    refusals = {
        "--project is missing": ["--job-spec", str(spec_file)],
        "found no run file": [],
        "--run-id is only for runs of a run file": ["--job-spec", str(spec_file), *FLAGS, "--run-id", "r"],
        "cost is not known": ["--job-spec", str(spec_file), *FLAGS],
        "needs a step that sends the next one": [*ONLY, "cluster.capacity_fallback=[spot, standard]",
                                                 "cluster.reduction_server=null"],
    }  # fmt: skip
    for words, arguments in refusals.items():
        answer = vlmpipe("submit", *arguments)
        assert (answer.code, words in answer.err) == (64, True), (words, answer.err)
    assert not vertex.requests


def test_a_dry_run_prints_the_request_and_sends_nothing(
    vertex: FakeVertex, prepared: FakeGcs, spec_file: Path, vlmpipe: Submit
) -> None:
    for arguments in (ONLY, ["--job-spec", str(spec_file), *FLAGS]):
        answer = vlmpipe("submit", *arguments, "--dry-run", "--json")
        assert answer.code == 0, answer.err
        assert answer.json["sent"] is False and answer.json["request"]["customJob"]["jobSpec"]["workerPoolSpecs"]
    assert not vertex.custom_jobs.jobs


def test_a_lost_answer_starts_no_second_job(
    vertex: FakeVertex, spec_file: Path, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_job, "POLL_S", 0.0)
    vertex.faults.append(Fault("drop_after"))
    answer = vlmpipe("submit", "--job-spec", str(spec_file), *FLAGS, "--yes", "--detach")
    assert (answer.code, len(vertex.custom_jobs.jobs)) == (0, 1)


def test_a_job_that_cannot_be_recorded_here_is_named_all_the_same(
    vertex: FakeVertex, spec_file: Path, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(submitted, "SUBMITTED", tmp_path / "file" / "submitted")
    answer = vlmpipe("submit", "--job-spec", str(spec_file), *FLAGS, "--yes", "--detach")
    assert (answer.code, len(vertex.custom_jobs.jobs)) == (0, 1)
    assert only_job(vertex).name in answer.err and "is not recorded in this folder" in answer.err


def test_one_job_for_a_sweep_is_refused(vertex: FakeVertex, prepared: FakeGcs, vlmpipe: Submit) -> None:
    refused = vlmpipe("submit", *ONLY, "sweep={grid: {train.epochs: [1, 2]}, starts: 1}", "--detach")
    assert (refused.code, "a run file with a sweep" in refused.err, vertex.custom_jobs.jobs) == (64, True, {})


def test_data_that_is_not_prepared_and_features_that_are_not_encoded_are_said(
    bucket: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers = DataPointers(prepared_uri="gs://b/p", features_uri="gs://b/f", features="encode")
    config = load_run_file(CONFIG, [MINE])
    paths = RunPaths(run_id="r1", root_uri="gs://example-bucket/vlmpipe")
    job = JobConfig.model_validate(config.to_run_json(paths))
    monkeypatch.setattr(JobConfig, "load", lambda uri: job)
    monkeypatch.setattr(submit_job, "find_prepared", lambda job: "gs://b/p")
    monkeypatch.setattr(submit_job, "point_to_features", lambda job, uri: pointers)
    with pytest.raises(UserError, match="have no features yet") as caught:
        submit_job._point_to_data(f"{RUN_URI}/run.json")
    assert caught.value.code == ExitCode.NOT_FOUND
    reused = pointers.model_copy(update={"features": "reuse"})
    monkeypatch.setattr(submit_job, "point_to_features", lambda job, uri: reused)
    submit_job._point_to_data(f"{RUN_URI}/run.json")
    assert JobConfig.pointers(job) == reused


@pytest.mark.slow
def test_training_alone_takes_up_data_that_an_earlier_run_prepared(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, tmp_path: Path
) -> None:
    """Nothing is replaced here: run file, plan, prepared data and features are the real ones."""
    on_vertex = {
        "output": {"root_uri": "gs://example-bucket/vlmpipe"},
        "features": {"cache": "off"},
        "cluster": {"image_uri": "us-central1-docker.pkg.dev/p/r/trainer@sha256:" + 64 * "a"},
        "plan": {"confirm_above_usd": 1e9},
        "gcp": {
            "project": "test-project",
            "pipeline_image": "us-central1-docker.pkg.dev/p/r/pipeline@sha256:" + 64 * "b",
            "service_account": "jobs@test-project.iam.gserviceaccount.com",
            "pipeline_root": "gs://example-bucket/pipelines",
        },
        "register": {"registry": ""},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(merged(TINY, on_vertex)))
    arguments = ["submit", str(path), "--only", "train", "--run-id", "r1", "--yes", "--detach", "--json"]
    early = vlmpipe(*arguments)
    assert (early.code, "this data is not prepared yet" in early.out + early.err) == (ExitCode.NOT_FOUND, True)
    assert not vertex.custom_jobs.jobs
    job = JobConfig.load("gs://example-bucket/vlmpipe/runs/r1/run.json")
    prepare_run(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
    open_storage(job.run.run_uri).delete("prepared.json")
    answer = vlmpipe(*arguments)
    assert answer.code == 0, answer.err
    assert job.pointers().features == "off" and only_job(vertex).job_spec.base_output_directory.output_uri_prefix == (
        "gs://example-bucket/vlmpipe/runs/r1"
    )
