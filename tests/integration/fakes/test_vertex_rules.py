"""The stand-in refuses what the comments of the API's messages refuse: each row changes one field of a good request."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.cloud.aiplatform_v1 import types as api

from tests.fakes.vertex.server import FakeVertex
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex import custom_jobs
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.rehearsal.vertex.messages import parse
from vlmpipe.rehearsal.vertex.rules import check_encryption_key, check_labels

PARENT = "projects/test-project/locations/us-central1"
IMAGE = {"imageUri": "us-docker.pkg.dev/p/r/trainer:1"}
POOL = {"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": 1, "containerSpec": IMAGE}
CUSTOM_JOB: dict[str, Any] = {"displayName": "train", "jobSpec": {"workerPoolSpecs": [POOL]}}
TUNING_JOB: dict[str, Any] = {
    "displayName": "search", "maxTrialCount": 2, "parallelTrialCount": 1, "trialJobSpec": CUSTOM_JOB["jobSpec"],
    "studySpec": {
        "metrics": [{"metricId": "loss", "goal": "MINIMIZE"}],
        "parameters": [{"parameterId": "rate", "doubleValueSpec": {"minValue": 0.1, "maxValue": 1.0}}],
    },
}  # fmt: skip
KEY = "projects/p/locations/{}/keyRings/r/cryptoKeys/k"
Change = Callable[[dict[str, Any]], Any]


def pool(**changes: Any) -> Change:
    return lambda job: job["jobSpec"].update(workerPoolSpecs=[{**POOL, **changes}])


def spec(**changes: Any) -> Change:
    return lambda job: job["jobSpec"].update(**changes)


CUSTOM_JOBS: dict[str, tuple[Change, str]] = {
    "no display name": (lambda job: job.pop("displayName"), "display_name"),
    "a long display name": (lambda job: job.update(displayName="x" * 129), "at most 128"),
    "a label of capitals": (lambda job: job.update(labels={"team": "Vision"}), "team=Vision"),
    "65 labels": (lambda job: job.update(labels={f"k{number}": "v" for number in range(65)}), "more than 64"),
    "a key of another region": (
        lambda job: job.update(encryptionSpec={"kmsKeyName": KEY.format("us-east1")}), "the key is in us-east1",
    ),
    "a key of another form": (lambda job: job.update(encryptionSpec={"kmsKeyName": "k"}), "kms_key_name"),
    "what the service sets": (lambda job: job.update(satisfiesPzs=True), "satisfies_pzs"),
    "no pools": (spec(workerPoolSpecs=[]), "worker_pool_specs is missing"),
    "a person's account": (spec(serviceAccount="me@example.com"), "service_account"),
    "a network by project id": (spec(network="projects/p/global/networks/n"), "network"),
    "a TensorBoard of another region": (
        spec(tensorboard="projects/p/locations/us-east1/tensorboards/1"), "is not one of us-central1",
    ),
    "a TensorBoard without an account": (
        spec(tensorboard="projects/p/locations/us-central1/tensorboards/1"), "required with tensorboard",
    ),
    "no machine type": (pool(machineSpec={}), "machine_type: required"),
    "no replica": (pool(replicaCount=0), "at least 1"),
    "no task": (pool(containerSpec=None), "one of container_spec and python_package_spec"),
    "no image": (pool(containerSpec={"args": ["a"]}), "image_uri: required"),
    "half a package": (
        pool(containerSpec=None, pythonPackageSpec={"pythonModule": "m"}), "executor_image_uri, package_uris",
    ),
    "an unknown disk": (pool(diskSpec={"bootDiskType": "pd-fast"}), "boot_disk_type"),
    "accelerators of no type": (
        pool(machineSpec={"machineType": "n1-standard-8", "acceleratorCount": 1}), "without accelerator_type",
    ),
    "a mount of a relative path": (
        pool(nfsMounts=[{"server": "10.0.0.2", "path": "a", "mountPoint": "m"}]), "path starts with /",
    ),
    "101 variables": (
        pool(containerSpec={**IMAGE, "env": [{"name": f"V{number}", "value": "1"} for number in range(101)]}),
        "more than 100",
    ),
    "a variable with a dash": (pool(containerSpec={**IMAGE, "env": [{"name": "A-B", "value": "1"}]}), "C identifier"),
    "a variable without a value": (pool(containerSpec={**IMAGE, "env": [{"name": "A"}]}), "has no value"),
}  # fmt: skip


def parameter(**changes: Any) -> Change:
    return lambda job: job["studySpec"].update(parameters=[{"parameterId": "rate", **changes}])


TUNING_JOBS: dict[str, tuple[Change, str]] = {
    "a long display name": (lambda job: job.update(displayName="x" * 129), "at most 128"),
    "a label of capitals": (lambda job: job.update(labels={"team": "Vision"}), "team=Vision"),
    "a key of another region": (
        lambda job: job.update(encryptionSpec={"kmsKeyName": KEY.format("us-east1")}), "the key is in us-east1",
    ),
    "a trial without a machine": (
        lambda job: job.update(trialJobSpec={"workerPoolSpecs": [{"replicaCount": 1}]}), "machine_type",
    ),
    "a default value": (parameter(doubleValueSpec={"minValue": 0, "maxValue": 1, "defaultValue": 0.5}), "for Vizier"),
    "no categories": (parameter(categoricalValueSpec={}), "categorical values are required"),
    "scaled categories": (
        parameter(categoricalValueSpec={"values": ["a"]}, scaleType="UNIT_LINEAR_SCALE"), "takes no scale_type",
    ),
    "values that fall": (parameter(discreteValueSpec={"values": [2.0, 1.0]}), "must increase"),
    "1001 values": (parameter(discreteValueSpec={"values": list(range(1001))}), "more than 1000"),
}  # fmt: skip


@pytest.fixture
def vertex() -> Iterator[FakeVertex]:
    with FakeVertex() as running:
        yield running


def post(vertex: FakeVertex, path: str, content: object) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(vertex.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", f"/v1/{PARENT}/{path}", json.dumps(content))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_requests_that_are_changed_are_good(vertex: FakeVertex) -> None:
    assert post(vertex, "customJobs", CUSTOM_JOB)[0] == 200
    assert post(vertex, "hyperparameterTuningJobs", TUNING_JOB)[0] == 200


@pytest.mark.parametrize(
    ("collection", "good", "name"),
    [("customJobs", CUSTOM_JOB, name) for name in CUSTOM_JOBS]
    + [("hyperparameterTuningJobs", TUNING_JOB, name) for name in TUNING_JOBS],
)
def test_a_job_with_one_fault_is_refused(vertex: FakeVertex, collection: str, good: dict[str, Any], name: str) -> None:
    change, said = (CUSTOM_JOBS if collection == "customJobs" else TUNING_JOBS)[name]
    job = copy.deepcopy(good)
    change(job)
    code, answer = post(vertex, collection, job)
    assert (code, said in answer["error"]["message"]) == (400, True), answer
    assert not vertex.custom_jobs.jobs and not vertex.tuning_jobs.jobs


def test_an_empty_pool_after_the_first_is_skipped(vertex: FakeVertex) -> None:
    job = copy.deepcopy(CUSTOM_JOB)
    job["jobSpec"]["workerPoolSpecs"] = [POOL, {}, POOL]
    assert post(vertex, "customJobs", job)[0] == 200


def test_a_cancellation_begins_and_then_is_done(vertex: FakeVertex) -> None:
    rehearsed = custom_jobs.CustomJobs(PARENT)
    name = f"{PARENT}/customJobs/1"
    job = parse(api.CustomJob, json.dumps(CUSTOM_JOB).encode())
    job.name, job.state = name, api.JobState.JOB_STATE_RUNNING
    rehearsed.jobs[name] = job
    rehearsed._created.add(name)
    rehearsed.cancel(name)
    assert job.state.name == "JOB_STATE_CANCELLING" and not job.end_time
    assert rehearsed.asked(name).state.name == "JOB_STATE_CANCELLED"
    assert (job.error.code, bool(job.end_time)) == (1, True)
    with pytest.raises(ApiError, match="cannot be cancelled"):
        rehearsed.cancel(name)


def test_only_the_states_that_the_comments_name_have_an_end_or_an_error() -> None:
    rehearsed = custom_jobs.CustomJobs(PARENT)
    job = api.CustomJob(state=api.JobState.JOB_STATE_PENDING)
    rehearsed.move(job, Step("EXPIRED"))
    assert not job.end_time, "a client that waits for end_time would wait for ever"
    with pytest.raises(AssertionError, match="has no error"):
        rehearsed.move(job, Step("EXPIRED", 4, "its wait expired"))


def test_a_listing_of_jobs_has_pages(vertex: FakeVertex) -> None:
    for _ in range(3):
        post(vertex, "customJobs", {**CUSTOM_JOB, "labels": {"a": "b"}})
    connection = http.client.HTTPConnection(vertex.endpoint.removeprefix("http://"), timeout=10)
    connection.request("GET", f"/v1/{PARENT}/customJobs?filter=labels.a%3Db")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert (len(answer["customJobs"]), answer["nextPageToken"]) == (custom_jobs.PAGE, "2")


@pytest.mark.parametrize("labels", [{"1a": "b"}, {"a": "B"}, {"a" * 64: "b"}, {"a": "b" * 64}])
def test_labels(labels: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="is not a label"):
        check_labels(labels)


def test_a_key_of_the_resources_own_region_is_taken() -> None:
    key = api.EncryptionSpec(kms_key_name=KEY.format("us-central1"))
    check_encryption_key(api.CustomJob(encryption_spec=key), "us-central1")
