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

from tests.fakes.vertex import FakeVertex, Fault

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


@pytest.mark.parametrize("job_id", ["", "Small", "1small", "small_1", "s" * 129])
def test_a_name_that_the_api_does_not_take_is_refused(ask: Ask, body: dict[str, Any], job_id: str) -> None:
    assert ask("POST", f"{JOBS}?pipelineJobId={job_id}", body)[0] == 400


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
def test_what_is_not_there_has_its_own_answer(
    ask: Ask, body: dict[str, Any], method: str, path: str, code: int
) -> None:
    assert ask(method, path, body if method == "POST" else None)[0] == code


def test_a_fault_breaks_only_its_requests_and_then_ends(ask: Ask, server: FakeVertex, body: dict[str, Any]) -> None:
    server.faults.append(Fault("status", code=403, message="no", reason="SERVICE_DISABLED"))
    code, answer = ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    assert (code, answer["error"]["details"][0]["reason"], server.jobs) == (403, "SERVICE_DISABLED", {})
    assert ask("POST", f"{JOBS}?pipelineJobId=small-1", body)[0] == 200


@pytest.mark.parametrize(("action", "jobs"), [("drop_before", 0), ("reset", 0), ("drop_after", 1)])
def test_a_cut_connection_leaves_what_its_name_says(
    ask: Ask, server: FakeVertex, body: dict[str, Any], action: str, jobs: int
) -> None:
    server.faults.append(Fault(action))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        ask("POST", f"{JOBS}?pipelineJobId=small-1", body)
    assert len(server.jobs) == jobs
