"""The stand-in for Kubeflow Pipelines is strict: it refuses what the API's own types and its server's checks refuse."""

from __future__ import annotations

import copy
import http.client
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import kfp_server_api
import pytest

from tests.fakes import kubeflow_pipelines as fake
from tests.fakes.kubeflow_pipelines import FakePipelines, has_loop_in_exit_handler

API = "/apis/v2beta1"
SPEC: dict[str, Any] = {"root": {"inputDefinitions": {"parameters": {"epochs": {"parameterType": "NUMBER_INTEGER"}}}}}
CRON = {"cron": "0 0 3 * * 1", "start_time": "2030-01-01T00:00:00Z", "end_time": None}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def pipelines() -> Iterator[FakePipelines]:
    with FakePipelines() as running:
        yield running


def ask(pipelines: FakePipelines, method: str, path: str, content: Any = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(pipelines.endpoint.removeprefix("http://"), timeout=10)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, API + path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def experiment(pipelines: FakePipelines) -> str:
    return str(ask(pipelines, "POST", "/experiments", {"display_name": "e"})[1]["experiment_id"])


def good(pipelines: FakePipelines, kind: str) -> dict[str, Any]:
    base = {"experiment_id": experiment(pipelines), "display_name": "x", "pipeline_spec": copy.deepcopy(SPEC)}
    if kind == "runs":
        return {**base, "runtime_config": {"parameters": {"epochs": 1}}}
    schedule = {"trigger": {"cron_schedule": dict(CRON)}, "max_concurrency": "1", "mode": "ENABLE", "no_catchup": True}
    return {**base, **schedule}


def cron(**changes: Any) -> Change:
    return lambda body: body["trigger"]["cron_schedule"].update(changes)


OF_BOTH: dict[str, tuple[Change, int, str]] = {
    "an unknown field": (lambda body: body.update(colour="red"), 400, "colour"),
    "no name": (lambda body: body.update(display_name=""), 400, "name is empty"),
    "an experiment that is not there": (lambda body: body.update(experiment_id="none"), 404, "not found"),
    "no pipeline": (lambda body: body.update(pipeline_spec={"steps": []}), 400, "pipeline spec is invalid"),
    "a parameter that the pipeline has not": (
        lambda body: body.update(runtime_config={"parameters": {"seed": 1}}), 400, "seed is not part of the pipeline",
    ),
    "an unknown setting": (
        lambda body: body.update(runtime_config={"parameters": {}, "cache": True}), 400, "cache",
    ),
}  # fmt: skip
REFUSED = {
    "runs": {
        **OF_BOTH,
        "an id of the client's": (lambda body: body.update(run_id="mine"), 400, "not for clients"),
        "a state": (lambda body: body.update(state="SUCCEEDED"), 400, "not for clients"),
        "a start": (lambda body: body.update(scheduled_at="2030-01-01T00:00:00Z"), 400, "not for clients"),
    },
    "recurringruns": {
        **OF_BOTH,
        "a status": (lambda body: body.update(status="ENABLED"), 400, "not for clients"),
        "a namespace": (lambda body: body.update(namespace="team"), 400, "not for clients"),
        "five fields of a cron line": (cron(cron="0 3 * * 1"), 400, "cron"),
        "Sunday as 7": (cron(cron="0 0 3 * * 7"), 400, "cron"),
        "a time zone in the cron line": (cron(cron="TZ=UTC 0 0 3 * * 1"), 400, "cron"),
        "a start that is no time": (cron(start_time="tomorrow"), 400, "start_time"),
        "an end without a time of day": (cron(end_time="2030-01-01"), 400, "end_time"),
        "a count in the cron line": (cron(max_runs=3), 400, "max_runs"),
        "no run at a time": (lambda body: body.update(max_concurrency="0"), 400, "between 1 and 10"),
        "eleven runs at a time": (lambda body: body.update(max_concurrency="11"), 400, "between 1 and 10"),
        "a number that is none": (lambda body: body.update(max_concurrency="two"), 400, "int64"),
        "no mode": (lambda body: body.pop("mode"), 400, "mode"),
        "an unknown mode": (lambda body: body.update(mode="PAUSED"), 400, "mode"),
        "no trigger": (lambda body: body.pop("trigger"), 501, "cron schedule alone"),
        "an interval": (
            lambda body: body.update(trigger={"periodic_schedule": {"interval_second": "60"}}), 501, "alone"
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, of_kind in REFUSED.items() for name in of_kind])
def test_a_request_with_one_fault_is_refused_and_makes_nothing(pipelines: FakePipelines, kind: str, name: str) -> None:
    change, code, said = REFUSED[kind][name]
    body = good(pipelines, kind)
    change(body)
    found, answer = ask(pipelines, "POST", f"/{kind}", body)
    assert (found, said in answer["message"]) == (code, True), answer
    assert not pipelines.runs and not pipelines.recurring


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (kfp_server_api.V2beta1Run, fake.GIVEN_BY_THE_SERVICE),
        (kfp_server_api.V2beta1RecurringRun, fake.GIVEN_FOR_A_SCHEDULE),
        (kfp_server_api.V2beta1Experiment, fake.GIVEN_FOR_AN_EXPERIMENT),
        (kfp_server_api.V2beta1Pipeline, fake.GIVEN_FOR_A_PIPELINE),
    ],
)
def test_every_field_whose_comment_says_output_is_refused(kind: Any, refused: set[str]) -> None:
    comments = {name: getattr(kind, name).__doc__ for name in kind.openapi_types}
    found = {name for name, comment in comments.items() if re.search(r"\bOutput( only)?\.", comment)}
    assert found and found <= refused, found - refused


@pytest.mark.parametrize("kind", REFUSED)
def test_the_requests_that_are_changed_are_good(pipelines: FakePipelines, kind: str) -> None:
    assert ask(pipelines, "POST", f"/{kind}", good(pipelines, kind))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "content", "code"),
    [
        ("POST", "/experiments", {"display_name": ""}, 400),
        ("POST", "/experiments", {"display_name": "x", "experiment_id": "1"}, 400),
        ("POST", "/pipelines", {"display_name": "x"}, 400),
        ("POST", "/pipelines", {"name": "x", "pipeline_id": "1"}, 400),
        ("POST", "/pipelines", {"name": "x", "tags": {"k": "v" * 64}}, 400),
        ("GET", "/pipelines", None, 501),
        ("GET", "/runs", None, 501),
        ("GET", "/runs/none", None, 404),
        ("DELETE", "/recurringruns/none", None, 404),
        ("POST", "/recurringruns/none:enable", {}, 404),
        ("GET", "/visualizations", None, 501),
    ],
)
def test_missing_and_unknown_values_are_not_guessed(
    pipelines: FakePipelines, method: str, path: str, content: Any, code: int
) -> None:
    assert ask(pipelines, method, path, content)[0] == code


def test_names_are_taken_once(pipelines: FakePipelines) -> None:
    for path, body in (("/experiments", {"display_name": "x"}), ("/pipelines", {"name": "x"})):
        assert [ask(pipelines, "POST", path, body)[0] for _ in range(2)] == [200, 409]


def test_a_kubeflow_of_several_users_wants_a_namespace() -> None:
    with FakePipelines(token="t", multi_user=True) as pipelines:
        assert ask(pipelines, "GET", "/runs/none")[0] == 401
        pipelines.token = ""
        assert ask(pipelines, "POST", "/experiments", {"display_name": "x"})[0] == 400
        assert ask(pipelines, "GET", "/recurringruns?page_size=2")[0] == 400


def test_a_run_that_is_over_cannot_be_stopped(pipelines: FakePipelines) -> None:
    run = ask(pipelines, "POST", "/runs", good(pipelines, "runs"))[1]["run_id"]
    assert [ask(pipelines, "POST", f"/runs/{run}:terminate")[0] for _ in range(2)] == [200, 400]


# ---- what the service says of a run


@pytest.mark.parametrize("state", ["COMPLETE", "CANCELLED", "DONE", "RUNTIME_STATE_UNSPECIFIED"])
def test_a_run_has_the_words_of_its_own_type(pipelines: FakePipelines, state: str) -> None:
    """COMPLETE is what an exit handler is told of its tasks, and no state of a run."""
    run = ask(pipelines, "POST", "/runs", good(pipelines, "runs"))[1]["run_id"]
    with pytest.raises(AssertionError, match="is no RuntimeState"):
        pipelines.move(run, state)
    with pytest.raises(AssertionError, match="is no RuntimeState"):
        pipelines.move(run, "RUNNING", tasks=[{"display_name": "train", "state": state}])
    with pytest.raises(AssertionError, match="has no pod"):
        pipelines.move(run, "RUNNING", tasks=[{"display_name": "train", "pod": "p"}])


def looping(*, handled: bool) -> dict[str, Any]:
    """A pipeline with a loop in a part of its own, below an exit handler or not."""
    part = {"dag": {"tasks": {"inner": {"componentRef": {"name": "deep"}}}}}
    deep = {"dag": {"tasks": {"loop": {"parameterIterator": {"itemInput": "i", "items": {"raw": "[1]"}}}}}}
    notify = {"dependentTasks": ["steps"], "triggerPolicy": {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}}
    tasks = {"steps": {"componentRef": {"name": "part"}}, **({"notify": notify} if handled else {})}
    return {"components": {"part": part, "deep": deep}, "root": {"dag": {"tasks": tasks}}}


@pytest.mark.parametrize(
    ("version", "handled", "ends_well"),
    [("2.14.3", True, False), ("2.16.0", True, False), ("2.17.0", True, True), ("2.14.3", False, True)],
)
def test_a_loop_in_an_exit_handler_fails_before_2_17(
    pipelines: FakePipelines, version: str, handled: bool, ends_well: bool
) -> None:
    pipelines.version = version
    body = {**good(pipelines, "runs"), "pipeline_spec": looping(handled=handled), "runtime_config": {}}
    run = ask(pipelines, "POST", "/runs", body)[1]["run_id"]
    assert has_loop_in_exit_handler(pipelines.runs[run]["pipeline_spec"]) is handled
    if ends_well:
        pipelines.move(run, "SUCCEEDED")
        return
    with pytest.raises(AssertionError, match="12390"):
        pipelines.move(run, "SUCCEEDED")
    pipelines.move(run, "FAILED")
