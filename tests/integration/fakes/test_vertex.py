"""The fake Vertex API refuses what the real one does: tests that pass against it mean something.

No postponed annotations here: kfp reads the types of a pipeline's parameters from the function itself.
"""

import copy
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from tests.fakes.vertex.server import FakeVertex, Fault
from vlmpipe.rehearsal.vertex.scripted_runs import Move

PARENT = "projects/test-project/locations/us-central1"
JOBS = f"/v1/{PARENT}/pipelineJobs"
Answer = tuple[int, dict[str, Any]]
Ask = Callable[..., Answer]


@dsl.component(base_image="python:3.12")
def echo(text: str) -> str:
    return text


NAMES, SIZES = ["a"], {"a": 1}


@dsl.pipeline(name="small")
def small(
    needed: str, count: int = 1, rate: float = 0.5, on: bool = True, names: list = NAMES, sizes: dict = SIZES
) -> None:
    echo(text=needed)


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A request that the API takes, with a value for every type of parameter."""
    path = tmp_path_factory.mktemp("pipeline") / "small.yaml"
    compiler.Compiler().compile(small, str(path))
    return {
        "displayName": "small",
        "labels": {"team": "vision"},
        "pipelineSpec": yaml.safe_load(path.read_text()),
        "runtimeConfig": {
            "gcsOutputDirectory": "gs://bucket/root",
            "parameterValues": {
                "needed": "x", "count": 2, "rate": 1, "on": False, "names": ["b"], "sizes": {"b": 2},
            },
        },
        "serviceAccount": "runner@test-project.iam.gserviceaccount.com",
        "network": "projects/123/global/networks/net",
    }  # fmt: skip


@pytest.fixture
def server() -> Iterator[FakeVertex]:
    with FakeVertex() as running:
        yield running


@pytest.fixture
def ask(server: FakeVertex) -> Ask:
    def call(method: str, path: str, content: object = None) -> Answer:
        connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
        try:
            connection.request(method, path, None if content is None else json.dumps(content))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return call


def _changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`body` with the field at the dotted path set, or removed where `value` is ...."""
    changed = copy.deepcopy(body)
    *parents, last = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return changed


def test_a_good_request_makes_a_job_that_can_be_read(ask: Ask, body: dict[str, Any]) -> None:
    code, created = ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    assert (code, created["name"]) == (200, f"{PARENT}/pipelineJobs/small-1")
    assert created["pipelineSpec"] == body["pipelineSpec"]
    assert ask("GET", f"{JOBS}/small-1") == (200, created)


PARAMETERS = "runtimeConfig.parameterValues"
REFUSALS = {
    "unknown field": ("enableCaching", True, "enableCaching"),
    "unknown field, deep": ("runtimeConfig.failurePolicies", 2, "failurePolicies"),
    "unknown enum value": ("runtimeConfig.failurePolicy", "FAST", "FAST"),
    "wrong type": ("displayName", 3, "displayName"),
    "no display name": ("displayName", ..., "display_name"),
    "no pipeline": ("pipelineSpec", ..., "pipeline_spec"),
    "no runtime config": ("runtimeConfig", ..., "runtime_config"),
    "no output directory": ("runtimeConfig.gcsOutputDirectory", ..., "gs://"),
    "output directory elsewhere": ("runtimeConfig.gcsOutputDirectory", "s3://bucket/root", "gs://"),
    "bucket of capitals": ("runtimeConfig.gcsOutputDirectory", "gs://Bucket/root", "gs://"),
    "state is the server's": ("state", "PIPELINE_STATE_RUNNING", "output-only"),
    "name is the server's": ("name", "x", "output-only"),
    "label of capitals": ("labels.team", "Vision", "team=Vision"),
    "label key with a dot": ("labels", {"a.b": "c"}, "a.b=c"),
    "a long display name": ("displayName", "x" * 129, "at most 128"),
    "schedule is the server's": ("scheduleName", "x", "output-only"),
    "deprecated parameters": ("runtimeConfig.parameters", {"needed": {"stringValue": "x"}}, "deprecated"),
    "another schema": ("pipelineSpec.schemaVersion", "3.0.0", "schema version"),
    "key of another region": (
        "encryptionSpec",
        {"kmsKeyName": "projects/p/locations/us-east1/keyRings/r/cryptoKeys/k"},
        "us-east1",
    ),
    "too many labels": ("labels", {f"k{number}": "v" for number in range(65)}, "65"),
    "service account is a person": ("serviceAccount", "me@example.com", "service_account"),
    "network by project id": ("network", "projects/test-project/global/networks/net", "network"),
    "network and psc": ("pscInterfaceConfig", {"networkAttachment": "a"}, "both"),
    "pipeline with an unknown field": ("pipelineSpec.platforms", {}, "platforms"),
    "pipeline without tasks": ("pipelineSpec.root.dag.tasks", {}, "no tasks"),
    "unknown parameter": (f"{PARAMETERS}.epoch", 1, "epoch"),
    "missing parameter": (f"{PARAMETERS}.needed", ..., "needed"),
    "number for a string": (f"{PARAMETERS}.needed", 1, "STRING"),
    "string for an integer": (f"{PARAMETERS}.count", "2", "NUMBER_INTEGER"),
    "fraction for an integer": (f"{PARAMETERS}.count", 2.5, "NUMBER_INTEGER"),
    "bool for an integer": (f"{PARAMETERS}.count", True, "NUMBER_INTEGER"),
    "string for a double": (f"{PARAMETERS}.rate", "1", "NUMBER_DOUBLE"),
    "number for a bool": (f"{PARAMETERS}.on", 1, "BOOLEAN"),
    "object for a list": (f"{PARAMETERS}.names", {}, "LIST"),
    "list for an object": (f"{PARAMETERS}.sizes", [], "STRUCT"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_request_with_one_fault_is_refused_and_makes_nothing(
    ask: Ask, server: FakeVertex, body: dict[str, Any], name: str
) -> None:
    path, value, said = REFUSALS[name]
    code, answer = ask("POST", f"{JOBS}?pipelineJobId=small-1", _changed(body, path, value))
    assert (code, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert said in answer["error"]["message"]
    assert server.jobs == {}


@pytest.mark.parametrize("job_id", ["", "Small", "1small", "small_1", "s" * 128])
def test_a_name_that_the_api_does_not_take_is_refused(ask: Ask, body: dict[str, Any], job_id: str) -> None:
    assert ask("POST", f"{JOBS}?pipelineJobId={job_id}", body)[0] == 400


def test_the_label_for_costs_is_the_services(ask: Ask, body: dict[str, Any]) -> None:
    name = "vertex-ai-pipelines-run-billing-id"
    created = ask("POST", f"{JOBS}?pipelineJobId=s-{'1' * 125}", _changed(body, f"labels.{name}", "mine"))[1]
    assert created["labels"]["team"] == "vision" and created["labels"][name] != "mine"


def test_the_second_job_of_a_name_is_refused(ask: Ask, server: FakeVertex, body: dict[str, Any]) -> None:
    first = ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    code, answer = ask("POST", f"{JOBS}?pipelineJobId=small-1", _changed(body, "displayName", "other"))
    assert (code, answer["error"]["status"]) == (409, "ALREADY_EXISTS")
    assert ask("GET", f"{JOBS}/small-1") == first


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", JOBS.replace("test-project", "other-project") + "?pipelineJobId=a", 403),
        ("POST", JOBS.replace("us-central1", "mars-north1") + "?pipelineJobId=a", 404),
        ("GET", f"{JOBS}/missing", 404),
        ("GET", f"{JOBS}/missing".replace("test-project", "other-project"), 403),
        ("POST", f"{JOBS}?pipelineJobId=a&wait=true", 400),
        ("GET", JOBS, 501),
        ("DELETE", f"{JOBS}/small-1", 501),
        ("POST", JOBS.replace("/v1/", "/v2/"), 501),
    ],
)
def test_missing_objects_and_kinds_have_different_answers(
    ask: Ask, body: dict[str, Any], method: str, path: str, code: int
) -> None:
    assert ask(method, path, body if method == "POST" else None)[0] == code


def test_a_fault_breaks_only_its_requests_and_then_ends(ask: Ask, server: FakeVertex, body: dict[str, Any]) -> None:
    server.faults.append(Fault("status", code=403, message="no", reason="SERVICE_DISABLED"))
    code, answer = ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    assert (code, answer["error"]["details"][0]["reason"], server.jobs) == (403, "SERVICE_DISABLED", {})
    assert ask("POST", f"{JOBS}?pipelineJobId=small-1", body)[0] == 200


@pytest.mark.parametrize(("action", "jobs"), [("drop_before", 0), ("reset", 0), ("drop_after", 1)])
def test_a_cut_connection_leaves_the_named_effect(
    ask: Ask, server: FakeVertex, body: dict[str, Any], action: str, jobs: int
) -> None:
    server.faults.append(Fault(action))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    assert len(server.jobs) == jobs


# ---- the course of a job, and the log


def test_a_job_moves_only_as_the_service_moves_it(ask: Ask, server: FakeVertex, body: dict[str, Any]) -> None:
    ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    server.runs.moves["small-1"] = [Move({"echo": "RUNNING"}), Move({"echo": "SUCCEEDED"}, "SUCCEEDED")]
    states = [ask("GET", f"{JOBS}/small-1")[1] for _ in range(3)]
    assert [one["state"].removeprefix("PIPELINE_STATE_") for one in states] == ["RUNNING", "SUCCEEDED", "SUCCEEDED"]
    job = server.jobs[f"{PARENT}/pipelineJobs/small-1"]
    for move in (Move(), Move({"echo": "RUNNING"}), Move({"other": "RUNNING"})):
        server.runs.moves["small-1"] = [move]
        with pytest.raises(AssertionError):
            server.runs.advance(job)


def test_cancelling_is_asked_for_once_and_takes_a_while(ask: Ask, server: FakeVertex, body: dict[str, Any]) -> None:
    ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    server.runs.moves["small-1"] = [Move({"echo": "RUNNING"})]
    ask("GET", f"{JOBS}/small-1")
    assert ask("POST", f"{JOBS}/small-1:cancel", {"force": True})[0] == 400
    assert ask("POST", f"{JOBS}/missing:cancel", {})[0] == 404
    assert [ask("POST", f"{JOBS}/small-1:cancel", {})[0] for _ in range(2)] == [200, 400]
    job = ask("GET", f"{JOBS}/small-1")[1]
    assert (job["state"], job["error"]["code"]) == ("PIPELINE_STATE_CANCELLED", 1)
    assert job["jobDetail"]["taskDetails"][0]["state"] == "CANCELLED"


LOGS = {"resourceNames": ["projects/test-project"], "filter": 'resource.type="ml_job" AND resource.labels.job_id=("7")'}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, 200),
        ({"pageSize": 0}, 400),
        ({"orderBy": "time"}, 400),
        ({"limit": 3}, 400),
        ({"resourceNames": ["projects/other"]}, 403),
        ({"filter": 'resource.type="ml_job"'}, 501),
        ({"filter": LOGS["filter"] + ' AND timestamp>="yesterday"'}, 501),
    ],
)
def test_the_log_takes_one_filter(ask: Ask, changed: dict[str, Any], code: int) -> None:
    assert ask("POST", "/v2/entries:list", LOGS | changed)[0] == code


# ---- schedules

SCHEDULES = f"/v1/{PARENT}/schedules"


@pytest.fixture
def schedule(body: dict[str, Any]) -> dict[str, Any]:
    """A schedule that the API takes."""
    return {
        "displayName": "small",
        "cron": "TZ=Europe/Paris 0 3 * * 1",
        "maxConcurrentRunCount": "1",
        "createPipelineJobRequest": {"parent": PARENT, "pipelineJob": body},
    }


JOB = "createPipelineJobRequest"
SCHEDULE_REFUSALS = {
    "unknown field": ("paused", True, "paused"),
    "no display name": ("displayName", ..., "display_name"),
    "no cron": ("cron", ..., "cron"),
    "no limit": ("maxConcurrentRunCount", ..., "max_concurrent_run_count"),
    "no job": (JOB, ..., "create_pipeline_job_request"),
    "four cron fields": ("cron", "0 3 * *", "cron line"),
    "unknown time zone": ("cron", "TZ=Mars/North 0 3 * * 1", "cron line"),
    "state is the server's": ("state", "PAUSED", "output-only"),
    "job elsewhere": (f"{JOB}.parent", PARENT.replace("us-", "asia-"), "parent"),
    "fewer than no runs": ("maxRunCount", "-1", "count runs"),
    "no run at a time": ("maxConcurrentRunCount", "0", "max_concurrent_run_count"),
    "fewer than no run at a time": ("maxConcurrentRunCount", "-1", "count runs"),
    "fewer than no active run": ("maxConcurrentActiveRunCount", "-1", "count runs"),
    "a count that is no number": ("maxRunCount", "many", "maxRunCount"),
    "a time that is no time": ("endTime", "next year", "endTime"),
    "runs counted by the client": ("startedRunCount", "3", "output-only"),
    "a next run of the client's": ("nextRunTime", "2030-01-01T00:00:00Z", "output-only"),
    "job with a name": (f"{JOB}.pipelineJobId", "small-1", "pipeline_job_id"),
    "bad job": (f"{JOB}.pipelineJob.displayName", ..., "display_name"),
    "unknown parameter of the job": (f"{JOB}.pipelineJob.{PARAMETERS}.epoch", 1, "epoch"),
}


@pytest.mark.parametrize("name", SCHEDULE_REFUSALS)
def test_a_schedule_with_one_fault_is_refused_and_makes_nothing(
    ask: Ask, server: FakeVertex, schedule: dict[str, Any], name: str
) -> None:
    path, value, said = SCHEDULE_REFUSALS[name]
    code, answer = ask("POST", SCHEDULES, _changed(schedule, path, value))
    assert (code, said in answer["error"]["message"], server.schedules.schedules) == (400, True, {})


@pytest.mark.parametrize(
    ("start", "end", "code"),
    [
        ("2030-01-01T00:00:00Z", "2029-01-01T00:00:00Z", 400),
        ("2030-01-01T00:00:00Z", "2030-01-01T00:00:00Z", 400),
        ("2030-01-01T00:00:00Z", "2030-01-01T00:00:01Z", 200),
    ],
)
def test_a_schedule_ends_after_it_starts(
    ask: Ask, server: FakeVertex, schedule: dict[str, Any], start: str, end: str, code: int
) -> None:
    assert ask("POST", SCHEDULES, schedule | {"startTime": start, "endTime": end})[0] == code
    assert len(server.schedules.schedules) == (code == 200)


def test_an_update_keeps_the_rules_of_times_and_counts(ask: Ask, schedule: dict[str, Any]) -> None:
    _, live = ask("POST", SCHEDULES, schedule | {"startTime": "2030-01-01T00:00:00Z"})
    path = f"/v1/{live['name']}"
    for mask, changed, code in (
        ("endTime", {"endTime": "2029-01-01T00:00:00Z"}, 400),
        ("endTime", {"endTime": "2031-01-01T00:00:00Z"}, 200),
        ("startTime", {"startTime": "2032-01-01T00:00:00Z"}, 400),
        ("maxRunCount", {"maxRunCount": "-5"}, 400),
        ("maxRunCount", {"maxRunCount": "5"}, 200),
        ("maxConcurrentRunCount", {"maxConcurrentRunCount": "-1"}, 400),
    ):
        assert ask("PATCH", f"{path}?updateMask={mask}", schedule | changed)[0] == code, (mask, changed)
    live = ask("GET", path)[1]
    assert (live["endTime"], live["maxRunCount"]) == ("2031-01-01T00:00:00Z", "5")


def test_a_schedule_goes_through_its_states(ask: Ask, schedule: dict[str, Any]) -> None:
    code, live = ask("POST", SCHEDULES, schedule)
    assert (code, live["state"]) == (200, "ACTIVE")
    path = f"/v1/{live['name']}"
    assert ask("POST", f"{path}:resume", {})[0] == 400
    assert ask("POST", f"{path}:pause", {"now": True})[0] == 400
    assert ask("POST", f"{path}:pause", {})[0] == 200
    assert ask("GET", path)[1]["state"] == "PAUSED"
    assert ask("POST", f"{path}:resume", {"catchUp": True})[0] == 200
    for mask, code in (("cron", 200), ("displayName", 400), ("state", 400), ("", 400)):
        assert ask("PATCH", f"{path}?updateMask={mask}", schedule | {"cron": "5 4 * * *"})[0] == code
    assert ask("GET", path)[1]["cron"] == "5 4 * * *"
    assert ask("PATCH", f"{path}?updateMask=cron", schedule | {"cron": "never"})[0] == 400
    assert [ask("DELETE", path)[0], ask("DELETE", path)[0]] == [200, 404]


def test_schedules_are_listed_by_name_and_page(ask: Ask, schedule: dict[str, Any]) -> None:
    for name in ("a", "b", "a", "a"):
        ask("POST", SCHEDULES, schedule | {"displayName": name})
    _, page = ask("GET", f"{SCHEDULES}?filter=display_name%3D%22a%22")
    assert [one["displayName"] for one in page["schedules"]] == ["a", "a"]
    _, rest = ask("GET", f"{SCHEDULES}?filter=display_name%3D%22a%22&pageToken={page['nextPageToken']}")
    assert (len(rest["schedules"]), "nextPageToken" in rest) == (1, False)
    assert ask("GET", f"{SCHEDULES}?filter=state%3DACTIVE")[0] == 501
