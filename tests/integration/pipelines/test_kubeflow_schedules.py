"""`vlmpipe schedule --target kubeflow` with kfp's client against the strict stand-in: what is live becomes what the run
file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubeflow_pipelines import FakePipelines, _Handler
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex
from tests.support.short_form import chosen
from tests.support.vertex.submit_runs import Answer, Submit
from vlmpipe.config.run_config import RunConfig
from vlmpipe.pipelines import submit
from vlmpipe.pipelines.compile import Compiled, compile_pipeline
from vlmpipe.platforms.kubeflow.runs.client import TOKEN_VARIABLE

pytest_plugins = ("tests.support.vertex.fixtures",)
FREE = "plan.machine.usd_per_hour=0"
DIGITS = (str(ROOT / "configs/digits.yaml"), *for_vertex(), "cluster.replica_count=1")
WEEKLY = "schedule.cron=0 3 * * 1"


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePipelines]:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with FakePipelines() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[str, Compiled]]:
    """What was compiled, by run file without its name: compiling takes as long as all the rest of a command."""
    return {}


@pytest.fixture
def schedule(vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch, compiled: dict[str, tuple[str, Compiled]]) -> Any:
    def compile_once(config: RunConfig, target: str, path: Path) -> Compiled:
        key = config.model_copy(update={"name": "one"}).model_dump_json()
        if key not in compiled:
            answer = compile_pipeline(config, target, path)
            compiled[key] = path.read_text(encoding="utf-8"), answer
        content, answer = compiled[key]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return Compiled(**{**vars(answer), "path": path})

    monkeypatch.setattr(submit, "compile_pipeline", compile_once)

    def run(verb: str, *arguments: str) -> Answer:
        if any("cron=" in one and one != WEEKLY for one in arguments):
            arguments = tuple(one for one in arguments if one != WEEKLY)
        price = () if any("usd_per_hour" in argument for argument in arguments) else (FREE,)
        return vlmpipe("schedule", verb, *DIGITS, *price, *arguments, "--target", "kubeflow")

    return run


def only(pipelines: FakePipelines) -> dict[str, Any]:
    (found,) = pipelines.recurring.values()
    return found


def test_a_schedule_is_created_once_and_starts_the_compiled_pipeline(pipelines: FakePipelines, schedule: Any) -> None:
    plan = schedule("plan", WEEKLY, "--json")
    assert plan.code == 0, plan.err
    assert (plan.json["action"], plan.json["usd_per_month"], pipelines.recurring) == ("create", 0.0, {})
    assert plan.json["needs_a_yes"] is None
    said = schedule("apply", WEEKLY)
    assert said.code == 0 and "schedule digits created" in said.out
    assert "of runs due while others are active, the latest starts afterwards" in said.out and "spot" not in said.out
    live = only(pipelines)
    assert live["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}
    assert (live["status"], int(live["max_concurrency"]), live["no_catchup"]) == ("ENABLED", 1, True)
    assert live["experiment_id"] in pipelines.experiments
    assert schedule("apply", WEEKLY, "--json").json["action"] == "nothing"
    assert only(pipelines) is live


CHANGES = {
    "schedule.cron=30 6 * * 7": "cron: 0 0 3 * * 1 -> 0 30 6 * * 0",
    "schedule.end_time=2099-01-01T00:00:00+01:00": "end_time: None -> 2098-12-31 23:00:00+00:00",
    "schedule.max_concurrent_active_run_count=3": "max_concurrency: 1 -> 3",
    "schedule.allow_queueing=true": "no_catchup: True -> False",
    "train.epochs=7": "pipeline: ",
}
SHORT = chosen(CHANGES, lambda name: name.startswith(("schedule.cron", "train.")))


@pytest.mark.parametrize(("override", "field"), SHORT.items())
def test_a_changed_schedule_is_made_anew_and_stays_paused(
    pipelines: FakePipelines, schedule: Any, override: str, field: str
) -> None:
    schedule("apply", WEEKLY)
    schedule("pause", WEEKLY)
    before = only(pipelines)
    changed = schedule("apply", WEEKLY, override)
    assert (changed.code, f"change    {field}" in changed.out) == (0, True), changed.err
    after = only(pipelines)
    assert after["recurring_run_id"] != before["recurring_run_id"] and after["status"] == "DISABLED"
    assert schedule("plan", WEEKLY, override, "--json").json["action"] == "nothing"


def test_an_old_and_a_new_schedule_never_start_runs_at_the_same_time(
    pipelines: FakePipelines, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, answer = list[int](), _Handler._recurring

    def counted(handler: _Handler, *given: Any) -> Any:
        result = answer(handler, *given)
        counts.append(sum(one["status"] == "ENABLED" for one in pipelines.recurring.values()))
        return result

    schedule("apply", WEEKLY)
    monkeypatch.setattr(_Handler, "_recurring", counted)
    assert schedule("apply", "schedule.cron=30 6 * * 6").code == 0
    assert (only(pipelines)["status"], max(counts)) == ("ENABLED", 1)


def test_pause_resume_delete_and_list(pipelines: FakePipelines, schedule: Any) -> None:
    for name in ("first", "second", "third"):  # more than a page of the stand-in's
        assert schedule("apply", WEEKLY, f"name={name}").code == 0
    foreign = {**next(iter(pipelines.recurring.values())), "recurring_run_id": "another", "description": "by hand"}
    pipelines.recurring["another"] = foreign
    assert [one["run_file"] for one in schedule("list", "--json").json["schedules"]] == ["first", "second", "third"]
    for verb, state in (("pause", "paused"), ("pause", "paused"), ("resume", "active"), ("resume", "active")):
        answer = schedule(verb, WEEKLY, "name=second")
        assert (answer.code, f"schedule second is {state}" in answer.out) == (0, True)
    table = schedule("list").out
    assert "third" in table and "0 0 3 * * 1" in table
    assert schedule("delete", "name=second").code == 0
    assert [one["display_name"] for one in pipelines.recurring.values()] == ["first", "third", "first"]
    missing = schedule("pause", "name=second")
    assert (missing.code, "has no schedule of second" in missing.err) == (64, True)


def test_machines_without_a_price_need_a_yes(pipelines: FakePipelines, schedule: Any) -> None:
    unpriced = "plan.machine.usd_per_hour=null"
    refused = schedule("apply", WEEKLY, unpriced)
    assert (refused.code, "machines of your own have no price" in refused.err, pipelines.recurring) == (64, True, {})
    assert schedule("apply", WEEKLY, unpriced, "--yes").code == 0
    schedule("pause", WEEKLY)
    assert schedule("resume", WEEKLY, unpriced).code == 64 and only(pipelines)["status"] == "DISABLED"
    assert schedule("resume", WEEKLY, unpriced, "--yes").code == 0 and only(pipelines)["status"] == "ENABLED"


def test_what_is_resumed_is_priced_as_it_was_scheduled(pipelines: FakePipelines, schedule: Any) -> None:
    schedule("apply", WEEKLY, "train.seed=5")
    schedule("pause", WEEKLY)
    asked = schedule("resume", WEEKLY, "plan.machine.usd_per_hour=null")
    assert asked.code == 64 and "as it is scheduled and not as in the run file, will cost is not known" in asked.err


def test_whether_missed_runs_are_started_is_fixed_when_it_is_made(pipelines: FakePipelines, schedule: Any) -> None:
    schedule("apply", WEEKLY)
    schedule("pause", WEEKLY)
    refused = schedule("resume", WEEKLY, "--catch-up")
    assert (refused.code, "only the last of the runs" in refused.err) == (64, True)
    schedule("apply", WEEKLY, "schedule.allow_queueing=true")
    assert schedule("resume", WEEKLY).code == 64
    unknown = schedule("resume", WEEKLY, "--catch-up", "plan.machine.usd_per_hour=1")
    assert (unknown.code, "does not say since when" in unknown.err) == (64, True)
    assert schedule("resume", WEEKLY, "--catch-up").code == 0  # machines that cost nothing more
    assert only(pipelines)["status"] == "ENABLED"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.timezone=Europe/Paris", "Kubeflow's scheduler has one time zone"),
        ("schedule.max_run_count=3", "counts no runs"),
        ("schedule.max_concurrent_active_run_count=11", "at most 10 on Kubeflow"),
        ("schedule.cron=0 3 * * 5-7", "5,6,0"),
    ],
)
def test_what_kubeflows_scheduler_cannot_do_is_refused(
    pipelines: FakePipelines, schedule: Any, override: str, words: str
) -> None:
    refused = schedule("apply", WEEKLY, override)
    assert (refused.code, words in refused.err, pipelines.recurring) == (64, True, {})


def test_two_of_a_name_are_not_chosen_between(pipelines: FakePipelines, schedule: Any) -> None:
    """As after a change whose second half, the deletion, failed."""
    schedule("apply", WEEKLY)
    pipelines.recurring["another"] = {**only(pipelines), "recurring_run_id": "another"}
    refused = schedule("apply", WEEKLY, "schedule.allow_queueing=true")
    assert (refused.code, "2 schedules of digits" in refused.err, len(pipelines.recurring)) == (69, True, 2)


def test_one_that_is_over_is_followed_by_a_new_one(pipelines: FakePipelines, schedule: Any) -> None:
    schedule("apply", WEEKLY)
    only(pipelines)["trigger"]["cron_schedule"]["end_time"] = "2020-01-01T00:00:00Z"
    assert schedule("list", "--json").json["schedules"][0]["state"] == "COMPLETED"
    assert schedule("apply", WEEKLY, "--json").json["action"] == "create"
    assert len(pipelines.recurring) == 2


def test_a_start_that_is_past_is_left_out_as_the_scheduler_would_start_what_was_due_since_then(
    pipelines: FakePipelines, schedule: Any
) -> None:
    schedule("apply", WEEKLY, "schedule.start_time=2020-01-06T00:00:00Z")
    assert "start_time" not in only(pipelines)["trigger"]["cron_schedule"]
    assert schedule("apply", WEEKLY, "schedule.start_time=2020-01-06T00:00:00Z", "--json").json["action"] == "nothing"
    schedule("apply", WEEKLY, "schedule.start_time=2099-01-05T00:00:00+01:00")
    assert only(pipelines)["trigger"]["cron_schedule"]["start_time"] == "2099-01-04T23:00:00Z"
    assert schedule("plan", WEEKLY, "schedule.start_time=2099-01-05T00:00:00").code == 64


def test_an_error_of_the_service_is_a_sentence(pipelines: FakePipelines, schedule: Any) -> None:
    pipelines.token = "needed"
    assert schedule("apply", WEEKLY).code == 77
    assert pipelines.recurring == {}


def test_a_kubeflow_for_several_users_needs_a_namespace(pipelines: FakePipelines, schedule: Any) -> None:
    pipelines.multi_user = True
    assert schedule("list").code == 64
    assert schedule("apply", WEEKLY, "kubeflow.namespace=team").code == 0
    assert schedule("list", "kubeflow.namespace=team", "--json").json["schedules"][0]["run_file"] == "digits"
