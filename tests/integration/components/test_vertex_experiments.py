"""`gcp.experiment`: a run that ended becomes a run of an experiment, by Google's SDK against the strict fake."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.cloud.aiplatform import initializer
from kfp.dsl import PipelineTaskFinalStatus

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.runs import JOB, RUN, put
from tests.support.vertex.submit_runs import CONFIG, MINE
from vlmpipe.components.notify import notify
from vlmpipe.components.runtime import vertex_experiments as experiments
from vlmpipe.components.runtime.vertex_experiments import LONGEST_ID_CHARS, log_run, run_name
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import RunPaths

pytest_plugins = ("tests.support.vertex.fixtures",)
EXPERIMENT = "llava-trials"
URI = f"gs://example-bucket/vlmpipe/runs/{JOB}"
STORE = "projects/test-project/locations/us-central1/metadataStores/default"


@pytest.fixture
def asked(bucket: FakeGcs, vertex: FakeVertex) -> Iterator[FakeVertex]:
    """A run whose run file names an experiment, trained and evaluated. The SDK keeps its settings for the process."""
    kept = dict(vars(initializer.global_config))
    write_run(bucket, EXPERIMENT)
    put(bucket, "summary.json", {"steps": 120, "final_loss": 0.5, "checkpoint": "0001-00000120-abc"})
    put(bucket, "evaluate.json", {"exact_match": 0.75, "slices": {"a": {"exact_match": 1.0}}})
    put(bucket, "decision.json", {"accepted": True, "reason": "above the bound"})
    yield vertex
    vars(initializer.global_config).update(kept)


def write_run(bucket: FakeGcs, experiment: str) -> None:
    config = load_run_file(CONFIG, [MINE, f"gcp.experiment={experiment}"])
    put(bucket, "run.json", config.to_run_json(RunPaths(run_id=JOB, root_uri="gs://example-bucket/vlmpipe")))


def context(server: FakeVertex, name: str) -> Any:
    return server.metadata.contexts[f"{STORE}/contexts/{name}"]


def test_a_run_is_logged_with_its_settings_and_results_and_again_only_once(asked: FakeVertex, bucket: FakeGcs) -> None:
    assert log_run(URI, "done") == f"logged as {JOB} in experiment {EXPERIMENT}"
    experiment, run = context(asked, EXPERIMENT), context(asked, f"{EXPERIMENT}-{JOB}")
    assert (experiment.schema_title, run.schema_title) == ("system.Experiment", "system.ExperimentRun")
    assert list(run.parent_contexts) == [experiment.name]
    found = run.metadata
    assert found["_metrics"] == {
        "train.steps": 120, "train.final_loss": 0.5, "evaluate.exact_match": 0.75, "gate.accepted": 1.0,
    }  # fmt: skip
    params = found["_params"]
    assert params["train.strategy"] == "zero2" and params["train.optimizer.learning_rate"] > 0
    assert params["run_uri"] == URI and params["cluster.machine_type"] == "a2-ultragpu-8g"
    assert not any("secret" in name or name.startswith(("cluster.env", "gcp.")) for name in params)
    assert found["_state"] == "COMPLETE"
    put(bucket, "evaluate.json", {"exact_match": 0.8})
    assert log_run(URI, "failed").startswith("logged as")
    again = context(asked, f"{EXPERIMENT}-{JOB}").metadata
    assert (len(asked.metadata.contexts), again["_metrics"]["evaluate.exact_match"], again["_state"]) == (
        2, 0.8, "FAILED",
    )  # fmt: skip
    assert not any("tensorboard" in request.lower() for request in asked.requests if "tb-run" not in request)


def test_the_exit_handler_logs_and_a_failure_to_log_fails_nothing(
    asked: FakeVertex, bucket: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmpipe.components.runtime.run_results.close_run", lambda run_uri, state: "report written")
    status = PipelineTaskFinalStatus("CANCELLED", RUN, "run", 1, "cancelled")
    for fault, said in ((None, "logged as"), (Fault("status", "GET", code=403), "warning: NOT logged")):
        asked.faults = [fault] if fault else []
        notify("", JOB, "gs://example-bucket/vlmpipe", "", "register-model", status)
        path = f"vlmpipe/runs/{JOB}/steps/notify.json"
        record = json.loads(bucket.client().bucket("example-bucket").blob(path).download_as_bytes())
        assert record["state"] == "done" and record["message"].startswith(f"report written; {said}")
    assert context(asked, f"{EXPERIMENT}-{JOB}").metadata["_state"] == "CANCELLED"


def test_what_keeps_a_run_from_being_logged_is_a_warning(asked: FakeVertex, bucket: FakeGcs) -> None:
    asked.faults.append(Fault("status", "GET", code=403, message="denied"))
    said = log_run(URI, "done")
    assert said.startswith("warning: NOT logged as an experiment: no permission in project test-project")
    assert not asked.metadata.contexts
    asked.metadata.has_store = True
    asked.faults.append(Fault("status", "POST", code=400, message="context_id: too long"))
    assert "NOT logged as an experiment: Vertex AI refuses the experiment" in log_run(URI, "done")
    other = {"displayName": "e", "schemaTitle": "system.ExperimentRun", "schemaVersion": "0.0.1"}
    assert post(asked, f"?contextId={EXPERIMENT}", other) == 200
    assert "NOT logged as an experiment: ValueError: Experiment name" in log_run(URI, "done")
    bucket.buckets.clear()
    assert "does not exist" in log_run(URI, "done")


def test_a_service_that_does_not_answer_is_not_waited_for(asked: FakeVertex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "TIMEOUT_S", 0.3)
    asked.latency_s = 1.0
    begun_s = time.monotonic()
    said = log_run(URI, "done")
    took_s = time.monotonic() - begun_s
    asked.latency_s = 0.0
    for thread in threading.enumerate():
        if thread.name == experiments.THREAD:
            thread.join()
    assert said == "warning: NOT logged as an experiment: TimeoutError: Vertex AI has not taken it within 0.3 s"
    assert took_s < 0.9
    assert context(asked, f"{EXPERIMENT}-{JOB}").metadata["_state"] == "COMPLETE", "a slow answer is an answer"


def test_local_runs_and_runs_without_an_experiment_are_not_logged(vertex: FakeVertex, bucket: FakeGcs) -> None:
    assert log_run(URI, "failed") == ""  # the run file was not accepted: there is no run.json
    write_run(bucket, "")
    assert (log_run(URI, "done"), log_run("/runs/1", "done"), vertex.requests) == ("", "", [])


def test_names_keep_to_the_services_letters_and_length() -> None:
    assert run_name("e" * 60, "digits-1") == "digits-1"
    names = {run_name("trials", name) for name in ("a.B", "a_b", "a-b", "x" * 128)}
    assert len(names) == 4
    assert all(len(f"trials-{name}") <= LONGEST_ID_CHARS for name in names)


def test_the_server_refuses_what_the_service_would(vertex: FakeVertex) -> None:
    vertex.metadata.has_store = True
    good = {"displayName": "e", "schemaTitle": "system.Experiment", "schemaVersion": "0.0.1"}
    bad: list[tuple[str, dict[str, Any]]] = [
        ("Big", good),
        ("abc", good),
        ("name", {**good, "state": "RUNNING"}),
        ("name", {**good, "parentContexts": ["a"]}),
        ("name", {**good, "schemaTitle": "system.Experiments"}),
        ("name", {**good, "metadata": {"text": "x" * 200_001}}),
        ("name", {**good, "displayName": "x" * 129}),
    ]
    assert [post(vertex, f"?contextId={name}", body) for name, body in bad] == [400] * len(bad)
    assert post(vertex, "?contextId=name", good) == 200
    assert post(vertex, "?contextId=name", good) == 409
    assert post(vertex, "/name:addContextChildren", {"childContexts": [f"{STORE}/contexts/none"]}) == 404
    assert post(vertex, "/name:addContextChildren", {"childContexts": [f"{STORE}/contexts/name"]}) == 400


def post(server: FakeVertex, path: str, content: object) -> int:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", f"/v1/{STORE}/contexts{path}", json.dumps(content))
        return connection.getresponse().status
    finally:
        connection.close()
