"""cluster.capacity_fallback: Google's client against the strict local server, with stockouts, waits, lost answers and
a limit."""

from __future__ import annotations

import json

import pytest

from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.capacity_fallback import (
    RESERVATION,
    RESERVED,
    RUN,
    RUNS,
    STOCKOUT,
    WAITS,
    climb,
    config,
    strategies,
    tried,
)
from vlmpipe.job_spec.build import Job
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import Storage

pytest_plugins = ("tests.support.vertex.capacity_fallback",)


def test_the_first_rung_that_finds_machines_trains(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    resources = json.loads(climb(server, run))
    (job,) = server.custom_jobs.jobs.values()
    assert resources["resources"][0]["resourceUri"].endswith(f"/v1/{job.name}")
    assert tried(run) == [("spot", "done")]
    assert (strategies(server), job.display_name) == (["SPOT"], "llava-7b-zero2-spot-train-spot")


def test_a_job_without_options_needs_no_plan(server: FakeVertex, run: Storage) -> None:
    """As that which encodes the images of a sweep, whose trainings have none."""
    run.delete("plan.json")
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    climb(server, run, config(), "cache_features")
    assert len(server.custom_jobs.jobs) == 1


def test_a_price_of_another_form_is_refused_before_a_machine_is_asked_for(server: FakeVertex, run: Storage) -> None:
    plan = json.loads(run.read("plan.json"))
    plan["cost"]["by_term"]["spot"]["steps"][0]["usd_per_hour"] = "36 dollars"
    run.write("plan.json", json.dumps(plan).encode())
    with pytest.raises(ConfigError, match=r"by cost.by_term.spot.steps.0.usd_per_hour"):
        climb(server, run)
    assert not server.custom_jobs.jobs


def test_each_rung_that_finds_none_leads_to_the_next_with_the_same_folder(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("PENDING")], [Step("PENDING"), STOCKOUT], [Step("RUNNING"), Step("SUCCEEDED")]]
    climb(server, run)
    assert tried(run) == [("spot", "no capacity"), ("flex_start", "no capacity"), ("standard", "done")]
    spot, flex, standard = server.custom_jobs.jobs.values()
    assert spot.state.name == "JOB_STATE_CANCELLED"
    assert 600 <= (spot.end_time - spot.create_time).total_seconds() <= 660
    assert flex.job_spec.scheduling.max_wait_duration.total_seconds() == 1200
    assert strategies(server) == ["SPOT", "FLEX_START", "STANDARD"]
    folders = {job.job_spec.base_output_directory.output_uri_prefix for job in (spot, flex, standard)}
    arguments = {
        tuple(pool.container_spec.args) for job in (spot, flex, standard) for pool in job.job_spec.worker_pool_specs
    }
    assert (folders, len(arguments)) == ({run.root_uri}, 1)
    why = [one["why"] for one in json.loads(run.read("capacity_fallback.json"))["attempts"]]
    assert why[0] == "no machines within 600 s, job PENDING"
    assert why[1].startswith("Resources are insufficient")


def test_a_reservation_is_an_option_and_the_others_leave_it_alone(server: FakeVertex, run: Storage) -> None:
    wanted = config(RESERVED, "cluster.capacity_fallback=[reservation, spot, standard]")
    run.write("run.json", json.dumps(wanted.to_run_json(RUN)).encode())
    server.custom_jobs.scripts = [[STOCKOUT], [STOCKOUT], RUNS]
    climb(server, run, wanted)
    assert tried(run) == [("reservation", "no capacity"), ("spot", "no capacity"), ("standard", "done")]
    assert strategies(server) == ["STANDARD", "SPOT", "STANDARD"]
    pools = [[pool.machine_spec for pool in job.job_spec.worker_pool_specs] for job in server.custom_jobs.jobs.values()]
    assert [list(machine.reservation_affinity.values) for machine in pools[0]] == [[RESERVATION]] * len(pools[0])
    assert not any("reservation_affinity" in machine for of_job in pools[1:] for machine in of_job)
    assert next(iter(server.custom_jobs.jobs.values())).display_name == "llava-7b-zero2-spot-train-reservation"


def test_an_option_may_be_in_another_region_and_the_next_one_at_home(server: FakeVertex, run: Storage) -> None:
    elsewhere = "projects/test-project/locations/us-east1"
    wanted = config(
        "cluster.capacity_fallback=[spot, {scheduling_strategy: spot, location: us-east1}, standard]",
        "gcp.tensorboard=projects/test-project/locations/us-central1/tensorboards/1",
    )
    run.write("run.json", json.dumps(wanted.to_run_json(RUN)).encode())
    plan = json.loads(run.read("plan.json"))
    plan["cost"]["elsewhere"] = {"spot@us-east1": {"steps": [{"job": "train", "usd_per_hour": 3600.0}]}}
    run.write("plan.json", json.dumps(plan).encode())
    server.parents.add(elsewhere)
    server.custom_jobs.scripts = [[STOCKOUT], [Step("RUNNING"), Step("RUNNING"), STOCKOUT], RUNS]
    resources = json.loads(climb(server, run, wanted))["resources"][0]["resourceUri"]
    assert tried(run) == [("spot", "no capacity"), ("spot@us-east1", "no capacity"), ("standard", "done")]
    jobs = list(server.custom_jobs.jobs.values())
    assert [job.name.rpartition("/customJobs")[0] for job in jobs] == [server.parent, elsewhere, server.parent]
    assert jobs[1].display_name == "llava-7b-zero2-spot-train-spot-us-east1"
    assert [bool(job.job_spec.tensorboard) for job in jobs] == [True, False, True]
    assert len({job.job_spec.base_output_directory.output_uri_prefix for job in jobs}) == 1
    assert resources.startswith("https://us-central1-aiplatform.googleapis.com/v1/")
    dollars = [one["usd"] for one in json.loads(run.read("capacity_fallback.json"))["attempts"]]
    assert dollars[1] >= 20, "at that region's price"
    server.custom_jobs.scripts = [[STOCKOUT], RUNS]
    run.write("run.json", (json.dumps(wanted.to_run_json(RUN)) + "\n").encode())  # resumed
    resources = json.loads(climb(server, run, wanted))["resources"][0]["resourceUri"]
    assert resources.startswith(f"https://us-east1-aiplatform.googleapis.com/v1/{elsewhere}/customJobs/")


@pytest.mark.parametrize("job", ["train", "evaluate"])
def test_fields_that_googles_component_lacks_reach_the_api(server: FakeVertex, run: Storage, job: Job) -> None:
    own = ["cluster.disable_retries=true", "cluster.restart_job_on_worker_restart=false"]
    wanted = config("cluster.capacity_fallback=[]", "gcp.enable_dashboard_access=true", *own)
    run.write("run.json", json.dumps(wanted.to_run_json(RUN)).encode())
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    climb(server, run, wanted, job)
    (sent,) = server.custom_jobs.jobs.values()
    assert sent.job_spec.scheduling.disable_retries and sent.job_spec.enable_dashboard_access
    assert sent.display_name == f"llava-7b-zero2-spot-{job}" and strategies(server) == ["SPOT"]
    assert json.loads(run.read(f"vertex_jobs/{job}.json"))["attempts"][0]["outcome"] == "done"


def test_a_job_without_fallback_waits_as_long_as_vertex_lets_it(server: FakeVertex, run: Storage) -> None:
    wanted = config("cluster.capacity_fallback=[]", "cluster.disable_retries=true")
    run.write("run.json", json.dumps(wanted.to_run_json(RUN)).encode())
    server.custom_jobs.scripts = [[Step("PENDING")] * 700 + RUNS]
    climb(server, run, wanted)
    server.custom_jobs.scripts = [[STOCKOUT]]
    run.write("run.json", (json.dumps(wanted.to_run_json(RUN)) + "\n").encode())
    with pytest.raises(UserError, match="no machines were found") as caught:
        climb(server, run, wanted)
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_flex_start_without_fallback_ends_when_its_wait_expires(server: FakeVertex, run: Storage) -> None:
    """Google's launcher knows FAILED, CANCELLED and PAUSED: it would ask for this job for ever."""
    flex_start = ["cluster.scheduling_strategy=flex_start", "cluster.max_wait_duration=7200s"]
    wanted = config("cluster.capacity_fallback=[]", *flex_start)
    run.write("run.json", json.dumps(wanted.to_run_json(RUN)).encode())
    server.custom_jobs.scripts = [[*WAITS, Step("EXPIRED")]]
    with pytest.raises(UserError, match="flex_start: its wait expired") as caught:
        climb(server, run, wanted)
    (sent,) = server.custom_jobs.jobs.values()
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert sent.job_spec.scheduling.max_wait_duration.total_seconds() == 7200


def test_the_launcher_that_flex_start_avoids_still_lacks_the_state() -> None:
    """Once Google's launcher knows it, flex_start needs no step of ours."""
    from google.cloud.aiplatform_v1.types import JobState
    from google_cloud_pipeline_components.container.v1.gcp_launcher import job_remote_runner as launcher

    known = {state.name for state in (*launcher._JOB_COMPLETE_STATES, *launcher._JOB_ERROR_STATES)}
    ends = {"JOB_STATE_EXPIRED", "JOB_STATE_PARTIALLY_SUCCEEDED"}
    assert ends < {state.name for state in JobState} and not ends & known


def test_a_quota_that_is_used_up_and_a_preemption_for_good_lead_on_too(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.stockouts = 1
    server.faults.append(Fault("status", code=429, message="Quota exceeded for quota metric requests per minute"))
    server.custom_jobs.scripts = [[Step("RUNNING"), Step("RUNNING"), STOCKOUT], RUNS]
    climb(server, run)
    assert tried(run) == [("spot", "no capacity"), ("flex_start", "no capacity"), ("standard", "done")]


def test_without_capacity_on_any_option_the_error_lists_the_attempts(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[STOCKOUT]] * 3
    with pytest.raises(UserError, match=r"no option of cluster.capacity_fallback found machines") as caught:
        climb(server, run)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert "standard: Resources are insufficient" in caught.value.found


def test_a_training_that_fails_is_not_tried_again_elsewhere(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [
        [Step("RUNNING"), Step("FAILED", 3, "The replica workerpool0-0 exited with status 65.")]
    ]
    with pytest.raises(UserError, match="the training job failed: The replica workerpool0-0"):
        climb(server, run)
    assert tried(run) == [("spot", "failed")]


def test_the_limit_stops_training_over_all_rungs(server: FakeVertex, run: Storage) -> None:
    settings = json.loads(run.read("run.json"))
    settings["cluster"]["max_spend_usd"] = 1.5  # an hour of Spot is 36: 20 s are 0.20; of flex_start 0.40
    run.write("run.json", json.dumps(settings).encode())
    server.custom_jobs.scripts = [[Step("RUNNING"), Step("RUNNING"), Step("RUNNING"), STOCKOUT], [Step("RUNNING")]]
    with pytest.raises(UserError, match=r"cluster.max_spend_usd, \$1.50, is reached") as caught:
        climb(server, run)
    assert caught.value.code == ExitCode.PREEMPTED
    assert tried(run) == [("spot", "no capacity"), ("flex_start", "stopped")]
    spent = [one["usd"] for one in json.loads(run.read("capacity_fallback.json"))["attempts"]]
    assert spent[0] == pytest.approx(0.6) and 1.5 <= sum(spent) < 1.5 + 2 * 0.4 + 1e-9


def test_too_many_requests_are_no_lack_of_machines(server: FakeVertex, run: Storage) -> None:
    message = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"
    server.faults.append(Fault("status", code=429, message=message, times=3))
    with pytest.raises(UserError, match="per minute"):
        climb(server, run)
    assert not server.custom_jobs.jobs, "the next option would have cost more"
