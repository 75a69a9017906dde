"""`vlmpipe schedule` with Google's real client against the strict fake: what is live becomes what the run file says."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud.aiplatform_v1.types import Schedule
from google.protobuf.field_mask_pb2 import FieldMask

from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.short_form import chosen
from tests.support.vertex.submit_runs import CHEAP, DEAR, RED, Submit, running_vertex, scheduler
from vlmpipe.config.run_config import RunConfig
from vlmpipe.google_cloud.client import schedule_client
from vlmpipe.pipelines import schedule as schedule_plan
from vlmpipe.pipelines import submit
from vlmpipe.pipelines.compile import Compiled, compile_pipeline
from vlmpipe.planner.spending.approval import Approved, Spending
from vlmpipe.platforms.vertex.schedules import VertexSchedule, VertexSchedules
from vlmpipe.rehearsal.vertex.messages import Call, Json
from vlmpipe.rehearsal.vertex.schedules import Schedules

WEEKLY = "schedule.cron=0 3 * * 1"
NAME = "llava-7b-zero2-spot"


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[bytes, Compiled]]:
    """What was compiled, by run file: compiling takes as long as all the rest of a command."""
    return {}


@pytest.fixture
def schedule(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    compiled: dict[str, tuple[bytes, Compiled]],
) -> Submit:
    def compile_once(config: RunConfig, target: str, path: Path) -> Compiled:
        key = config.model_dump_json()
        if key not in compiled:
            answer = compile_pipeline(config, target, path)
            compiled[key] = path.read_bytes(), answer
        content, answer = compiled[key]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return replace(answer, path=path)

    monkeypatch.setattr(submit, "compile_pipeline", compile_once)
    return scheduler(tmp_path, monkeypatch, capfd)


def only(vertex: FakeVertex) -> Schedule:
    (found,) = vertex.schedules.schedules.values()
    return found


def writes(vertex: FakeVertex) -> list[str]:
    return [request for request in vertex.requests if not request.startswith("GET")]


def test_a_schedule_is_created_once_and_shows_the_cost_of_a_month(vertex: FakeVertex, schedule: Submit) -> None:
    before = schedule("plan", WEEKLY, "--json")
    assert (before.code, before.json["action"], vertex.schedules.schedules) == (0, "create", {})
    assert before.json["runs_per_month"] == pytest.approx(365.25 / 12 / 7)
    assert before.json["usd_per_month"] == pytest.approx(CHEAP.usd * 365.25 / 12 / 7)
    assert len(before.json["next_starts"]) == 3
    made = schedule("apply", WEEKLY)
    assert (made.code, "created" in made.out) == (0, True)
    live = only(vertex)
    assert (live.display_name, live.cron) == (NAME, "TZ=UTC 0 3 * * 1")
    assert (live.max_concurrent_run_count, live.max_concurrent_active_run_count, live.allow_queueing) == (1, 1, False)
    assert live.create_pipeline_job_request.pipeline_job.pipeline_spec["pipelineInfo"]["name"] == NAME
    requests = len(writes(vertex))
    again = schedule("apply", WEEKLY, "--json")
    assert (again.json["action"], again.json["changes"], len(writes(vertex))) == ("nothing", [], requests)
    assert "does nothing" in schedule("plan", WEEKLY).out


CHANGES = {
    "schedule.cron=30 4 * * *": ["cron"],
    "schedule.timezone=Europe/Paris": ["cron"],
    "schedule.max_concurrent_active_run_count=2": ["max_concurrent_run_count", "max_concurrent_active_run_count"],
    "schedule.allow_queueing=true": ["allow_queueing"],
    "schedule.max_run_count=5": ["max_run_count"],
    "schedule.end_time=2030-01-01T00:00:00Z": ["end_time"],
    "schedule.start_time=2029-01-01T00:00:00Z": ["start_time"],
    "train.epochs=7": ["create_pipeline_job_request"],
    "gcp.labels={team: vision}": ["create_pipeline_job_request"],
}
# Of the schedule itself one field that is sent as two names, and one of the request that it makes.
SHORT = chosen(CHANGES, lambda name: name.startswith(("schedule.timezone", "schedule.max_concurrent", "train.")))


@pytest.mark.parametrize(("setting", "fields"), SHORT.items())
def test_what_changes_in_the_run_file_and_nothing_else_is_changed(
    vertex: FakeVertex, schedule: Submit, setting: str, fields: list[str]
) -> None:
    schedule("apply", WEEKLY)
    name = only(vertex).name
    settings = [setting] if setting.startswith("schedule.cron") else [WEEKLY, setting]
    plan = schedule("plan", *settings, "--json")
    assert [change["field"] for change in plan.json["changes"]] == fields
    done = schedule("apply", *settings, "--yes")  # a run every day is dear
    assert (done.code, only(vertex).name, "changed" in done.out) == (0, name, True)
    (patch,) = (request for request in vertex.requests if request.startswith("PATCH"))
    assert patch.count("%2C") + patch.count(",") == len(fields) - 1
    assert schedule("plan", *settings, "--json").json["action"] == "nothing"
    back = schedule("apply", WEEKLY, "--json")  # what was added is taken out again
    expected = {"start_time": "nothing", "allow_queueing": "replace", "max_run_count": "replace", "end_time": "replace"}
    assert back.json["action"] == expected.get(fields[0], "update")
    assert (only(vertex).name == name) == (back.json["action"] != "replace")
    assert schedule("plan", WEEKLY, "--json").json["action"] == "nothing"


def test_a_schedule_with_a_field_removed_is_made_anew_and_stays_paused(vertex: FakeVertex, schedule: Submit) -> None:
    """The service cannot unset a field: it refuses, or keeps the old value."""
    limited = [WEEKLY, "schedule.end_time=2030-01-01T00:00:00Z", "schedule.max_run_count=5"]
    schedule("apply", *limited)
    schedule("pause", WEEKLY)
    before = only(vertex).name
    said = schedule("plan", WEEKLY).out
    assert "note: Vertex AI cannot unset end_time and max_run_count, so apply makes a new schedule" in said
    done = schedule("apply", WEEKLY)
    assert (done.code, f"schedule {NAME} replaced: " in done.out) == (0, True)
    live = only(vertex)
    assert (live.name == before, live.state.name, live.max_run_count, bool(live.end_time)) == (
        False,
        "PAUSED",
        0,
        False,
    )


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of active schedules after each request about one; of a server that starts later."""
    counts, answer = list[int](), Schedules.answer

    def counted(schedules: Schedules, call: Call) -> Json:
        try:
            return answer(schedules, call)
        finally:
            counts.append(sum(one.state.name == "ACTIVE" for one in schedules.schedules.values()))

    monkeypatch.setattr(Schedules, "answer", counted)
    return counts


def test_an_old_and_a_new_schedule_never_start_runs_at_the_same_time(
    active: list[int], vertex: FakeVertex, schedule: Submit
) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5")
    assert schedule("apply", WEEKLY).code == 0
    assert (only(vertex).state.name, only(vertex).max_run_count) == ("ACTIVE", 0)
    assert max(active) == 1


@pytest.mark.parametrize(("refused", "state"), [(1, "ACTIVE"), (2, "PAUSED")])
def test_where_no_new_schedule_can_be_made_the_old_one_goes_on(
    vertex: FakeVertex, schedule: Submit, monkeypatch: pytest.MonkeyPatch, refused: int, state: str
) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5")
    create = VertexSchedules.create

    def denied(schedules: VertexSchedules, wanted: VertexSchedule, approved: Approved) -> VertexSchedule:
        vertex.faults.append(Fault("status", method="POST", times=refused, code=403, message="denied"))
        return create(schedules, wanted, approved)

    monkeypatch.setattr(VertexSchedules, "create", denied)
    done = schedule("apply", WEEKLY)
    live = only(vertex)
    assert (done.code, live.max_run_count, live.state.name) == (77, 5, state)
    assert live.catch_up is (state == "ACTIVE"), "runs that were due meanwhile are started"
    if state == "PAUSED":
        assert "is paused and could not be resumed" in done.err
        vertex.faults.clear()
        assert "vlmpipe schedule resume CONFIG --catch-up" in done.err
        assert schedule("resume", WEEKLY, "--catch-up").code == 0 and only(vertex).state.name == "ACTIVE"


def test_a_run_that_was_due_while_the_schedule_was_made_anew_is_named(
    vertex: FakeVertex, schedule: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5")
    only(vertex).next_run_time = datetime(2020, 1, 6, 3, 0, tzinfo=UTC)
    done = schedule("apply", WEEKLY)
    assert (done.code, "the run that was due at 2020-01-06 03:00 UTC was not started" in done.err) == (0, True)


def test_a_deletion_that_fails_leaves_both_and_the_next_command_says_so(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5")
    vertex.faults.append(Fault("status", method="DELETE", code=403, message="denied"))
    assert schedule("apply", WEEKLY).code == 77
    assert len(vertex.schedules.schedules) == 2
    assert f"2 schedules of {NAME}" in schedule("plan", WEEKLY).err


def test_a_new_schedule_that_cannot_be_paused_as_the_old_one_is_does_not_stay(
    vertex: FakeVertex, schedule: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5")
    schedule("pause", WEEKLY)
    before, pause = only(vertex).name, VertexSchedules.pause

    def denied(schedules: VertexSchedules, live: VertexSchedule) -> VertexSchedule:
        vertex.faults.append(Fault("status", method="POST", code=403, message="denied"))
        return pause(schedules, live)

    monkeypatch.setattr(VertexSchedules, "pause", denied)
    assert schedule("apply", WEEKLY).code == 77
    assert (only(vertex).name, only(vertex).state.name) == (before, "PAUSED")


def test_the_stand_in_refuses_to_unset_a_field(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY, "schedule.max_run_count=5", "schedule.allow_queueing=true")
    live, client = only(vertex), schedule_client("us-central1")
    for field, empty in (("max_run_count", 0), ("allow_queueing", False), ("max_concurrent_active_run_count", 0)):
        emptied = Schedule(live)
        setattr(emptied, field, empty)
        with pytest.raises(BadRequest, match=f"{field}.*cannot be unset"):
            client.update_schedule(schedule=emptied, update_mask=FieldMask(paths=[field]))
    named = Schedule(
        display_name="x" * 129,
        cron=live.cron,
        max_concurrent_run_count=1,
        create_pipeline_job_request=live.create_pipeline_job_request,
    )
    with pytest.raises(BadRequest, match="display_name"):
        client.create_schedule(parent="projects/test-project/locations/us-central1", schedule=named)


def test_a_change_made_in_the_console_is_found(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY)
    only(vertex).create_pipeline_job_request.pipeline_job.service_account = "other@x.iam.gserviceaccount.com"
    only(vertex).max_concurrent_active_run_count = 9
    said = schedule("plan", WEEKLY).out
    assert "max_concurrent_active_run_count: 9 -> 1" in said
    assert "serviceAccount was changed" in said
    schedule("apply", WEEKLY)
    assert schedule("plan", WEEKLY, "--json").json["action"] == "nothing"


def test_pause_resume_delete_and_list(vertex: FakeVertex, schedule: Submit) -> None:
    for name in ("first", "second", "third"):  # more than a page of the fake's
        assert schedule("apply", WEEKLY, f"name={name}").code == 0
    foreign = Schedule(only_of(vertex, "first"))
    foreign.name += "9"
    del foreign.create_pipeline_job_request.pipeline_job.labels["vlmpipe-schedule"]
    vertex.schedules.schedules[foreign.name] = foreign
    assert [one["run_file"] for one in schedule("list", "--json").json["schedules"]] == ["first", "second", "third"]
    for verb, state in (("pause", "paused"), ("pause", "paused"), ("resume", "active"), ("resume", "active")):
        answer = schedule(verb, WEEKLY, "name=second")
        assert (answer.code, f"schedule second is {state}" in answer.out) == (0, True)
    schedule("pause", "name=second")
    dear = schedule("resume", "name=second", plan=DEAR)
    assert (dear.code, "a month of second is planned to cost $1,791" in dear.err) == (64, True)
    assert only_of(vertex, "second").state.name == "PAUSED"
    only_of(vertex, "second").last_pause_time = datetime.now(UTC) - timedelta(days=36)  # 5 runs were due, or 6
    missed = schedule("resume", "name=second", "--catch-up")
    assert (missed.code, "with the runs that were due during the pause" in missed.err) == (64, True)
    planned = functools.partial(schedule, "resume", "name=second", "--catch-up", plan=DEAR)
    only_of(vertex, "second").max_run_count = 1
    assert "is planned to cost $412" in planned().err, "one run is left, however many were due"
    only_of(vertex, "second").max_run_count = 0
    only_of(vertex, "second").end_time = datetime.now(UTC) - timedelta(
        days=22
    )  # 2 of those that were due are before it
    assert "is planned to cost $824" in planned().err, "none starts after the schedule's end"
    only_of(vertex, "second").end_time = None
    assert schedule("resume", "name=second", "--catch-up", "--yes", "--json").json["catchUp"] is True
    assert schedule("delete", "name=second").code == 0
    assert sorted(one.display_name for one in vertex.schedules.schedules.values()) == ["first", "first", "third"]
    for verb in ("pause", "resume", "delete"):
        missing = schedule(verb, "name=second")
        assert (missing.code, "has no schedule of second" in missing.err) == (64, True)
    table = schedule("list").out
    assert "third" in table and "TZ=UTC 0 3 * * 1" in table and "second" not in table


def test_what_is_resumed_is_priced_as_it_was_scheduled(
    vertex: FakeVertex, schedule: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with the prices of the run file that is given."""

    def spending(config: RunConfig, _: object) -> Spending:
        return replace(CHEAP, usd=float(config.train.max_steps or 0) * (config.plan.machine.usd_per_hour or 0))

    schedule("apply", WEEKLY, "train.max_steps=100")
    schedule("pause")
    monkeypatch.setattr(schedule_plan, "plan_config", lambda config: config)
    monkeypatch.setattr(schedule_plan, "spending_of", spending)
    price = "plan.machine.usd_per_hour=2"
    same = schedule("resume", "train.max_steps=100", price, plan=None)
    assert (same.code, f"a month of {NAME} is planned to cost $870" in same.err) == (64, True)
    other = schedule("resume", "train.max_steps=1", price, plan=None)
    assert (other.code, "as it is scheduled and not as in the run file, is planned to cost $870" in other.err) == (
        64,
        True,
    )
    spec = only(vertex).create_pipeline_job_request.pipeline_job.pipeline_spec
    default = spec["root"]["inputDefinitions"]["parameters"]["run_file"]
    earlier = json.loads(default["defaultValue"])
    earlier["train"]["freeze_gc"] = True  # a field of an earlier version, which did nothing
    default["defaultValue"] = json.dumps(earlier)
    old = schedule("resume", "train.max_steps=1", price, plan=None)
    assert (old.code, "is planned to cost $870" in old.err) == (64, True)
    default["defaultValue"] = '{"unknown_key": 1}'
    unread = schedule("resume", price, plan=None)
    assert (unread.code, "this version does not take the run file that its runs read" in unread.err) == (64, True)
    default["defaultValue"] = "none"
    hidden = schedule("resume", price, plan=None)
    assert (hidden.code, "does not show the run file that its runs read" in hidden.err) == (64, True)


def only_of(vertex: FakeVertex, name: str) -> Schedule:
    return next(one for one in vertex.schedules.schedules.values() if one.display_name == name)


def test_one_that_is_over_is_followed_by_a_new_one(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY)
    only(vertex).state = Schedule.State.COMPLETED
    assert schedule("plan", WEEKLY, "--json").json["action"] == "create"
    schedule("apply", WEEKLY)
    assert sorted(one.state.name for one in vertex.schedules.schedules.values()) == ["ACTIVE", "COMPLETED"]
    assert schedule("pause").code == 0


def test_two_of_a_name_are_not_chosen_between(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY)
    twin = Schedule(only(vertex))
    twin.name += "0"
    vertex.schedules.schedules[twin.name] = twin
    answer = schedule("apply", WEEKLY)
    assert (answer.code, f"2 schedules of {NAME}" in answer.err, len(writes(vertex))) == (69, True, 1)


@pytest.mark.parametrize("action", ["drop_before", "drop_after", "status", "reset"])
def test_a_lost_answer_makes_no_second_schedule(vertex: FakeVertex, schedule: Submit, action: str) -> None:
    vertex.faults.append(Fault(action))  # type: ignore[arg-type]
    assert schedule("apply", WEEKLY).code == 0
    assert only(vertex).cron == "TZ=UTC 0 3 * * 1"


def test_without_any_answer_the_outcome_is_reported_as_unknown(
    vertex: FakeVertex, schedule: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    vertex.faults += [Fault("drop_after"), Fault("status", method="GET", times=9999)]
    with monkeypatch.context() as patched:
        patched.setattr(VertexSchedules, "find", lambda self, name: None)  # as it was before the faults began
        answer = schedule("apply", WEEKLY)
    assert (answer.code, "whether the schedule was made is not known" in answer.err) == (69, True)
    vertex.faults.clear()
    assert schedule("apply", WEEKLY, "--json").json["action"] == "nothing"
    assert len(vertex.schedules.schedules) == 1


def test_a_deletion_whose_answer_is_lost_is_a_deletion(vertex: FakeVertex, schedule: Submit) -> None:
    schedule("apply", WEEKLY)
    vertex.faults.append(Fault("drop_after", method="DELETE"))
    assert (schedule("delete").code, vertex.schedules.schedules) == (0, {})


def test_a_month_that_is_dear_needs_a_yes_and_a_red_plan_has_none(vertex: FakeVertex, schedule: Submit) -> None:
    dear = schedule("apply", WEEKLY, "plan.confirm_above_usd=50")  # one run costs 20 dollars
    assert (dear.code, "a month of" in dear.err, vertex.schedules.schedules) == (64, True, {})
    assert schedule("apply", WEEKLY, plan=RED).code == 64
    assert "a month of" in schedule("plan", WEEKLY, "--json", plan=DEAR).json["needs_a_yes"]
    assert schedule("apply", WEEKLY, "plan.confirm_above_usd=50", "--yes").code == 0


def test_without_a_schedule_section_the_error_shows_how_to_write_one(vertex: FakeVertex, schedule: Submit) -> None:
    answer = schedule("plan")
    assert (answer.code, "has no schedule section" in answer.err, "schedule.cron" in answer.err) == (64, True, True)


def test_no_permission_is_a_sentence(vertex: FakeVertex, schedule: Submit) -> None:
    vertex.faults.append(Fault("status", method="GET", code=403, message="Permission 'x' denied"))
    answer = schedule("plan", WEEKLY)
    assert (answer.code, "Permission 'x' denied" in answer.err, "Traceback" in answer.err) == (77, True, False)
