"""cluster.capacity_fallback: Google's client against the strict local server, with stockouts, waits, lost answers and
a limit."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from google.api_core.retry import Retry
from requests.exceptions import ConnectionError as NoConnection
from urllib3.exceptions import MaxRetryError, NameResolutionError

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.paths import ROOT
from tests.support.pipelines.graphs import all_tasks, shape, steps
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.sections.cluster import MAX_WATCHED_S
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.job_spec.build import Job, check_jobs, job_settings, worker_pools
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.planner.sweep import plan_config
from vlmpipe.platforms.vertex import retries
from vlmpipe.platforms.vertex.client import ENDPOINT_VARIABLE, translate_errors
from vlmpipe.platforms.vertex.job_step import run_vertex_job
from vlmpipe.platforms.vertex.jobs.capacity_fallback import CapacityFallback
from vlmpipe.platforms.vertex.jobs.run_labels import RUN_LABELS_VARIABLE, run_labels
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.storage import Storage, open_storage
from vlmpipe.trainer.storage.records import write_record

SPOT_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
FALLBACK = (
    "cluster.capacity_fallback=[{scheduling_strategy: spot, wait: 600s}, {scheduling_strategy: "
    "flex_start, wait: 1200s}, {scheduling_strategy: standard, wait: 0s}]"
)
SETTINGS = [
    FALLBACK, "cluster.reduction_server=null", "plan.samples=100000", "plan.sample_tokens=700",
    "gcp.project=test-project", "gcp.location=us-central1",
]  # fmt: skip
RESERVATION = "projects/test-project/zones/us-central1-a/reservations/mine"
RESERVED = (
    "cluster.reservation_affinity={reservation_affinity_type: specific_reservation, values: [" + RESERVATION + "]}"
)
WAITS = [Step("QUEUED"), Step("PENDING")]
RUNS = [Step("RUNNING"), Step("RUNNING"), Step("SUCCEEDED")]
STOCKOUT = Step("FAILED", 8, "Resources are insufficient in region: us-central1. Please try a different region.")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    for name in ("RETRY", "PATIENT"):
        monkeypatch.setattr(retries, name, Retry(initial=0.01, maximum=0.05, timeout=5.0))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        yield running


def config(*overrides: str) -> RunConfig:
    own = [one for one in SETTINGS if one.partition("=")[0] not in {given.partition("=")[0] for given in overrides}]
    return load_run_file(SPOT_FILE, [*own, *overrides])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A run's folder as resolve-run leaves it, with prices that are easy to multiply."""
    terms = {"spot": 36.0, "flex_start": 72.0, "standard": 100.0}
    by_term = {name: {"steps": [{"job": "train", "usd_per_hour": usd}]} for name, usd in terms.items()}
    with FakeGcs(buckets=["team"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        folder = open_storage("gs://team/runs/mine")
        folder.write("plan.json", json.dumps({"cost": {"by_term": by_term}}).encode())
        folder.write("run.json", json.dumps(config().to_dict()).encode())
        yield folder


def climb(server: FakeVertex, run: Storage, wanted: RunConfig | None = None, job: Job = "train") -> str:
    """As the step does, by the server's clock."""
    wanted = wanted or config()
    settings = {"encryption_spec_key_name": "", "max_wait_duration": "", **job_settings(wanted, job)}
    spec = {
        "worker_pool_specs": worker_pools(wanted, job, run.root_uri),
        "scheduling": {"timeout": wanted.cluster.timeout, "restart_job_on_worker_restart": True},
        "base_output_directory": {"output_uri_prefix": run.root_uri},
        "service_account": job_settings(wanted, job)["service_account"],
        **({"tensorboard": wanted.gcp.tensorboard} if wanted.gcp.tensorboard else {}),
    }
    fallback = CapacityFallback(settings, spec, now=lambda: server.custom_jobs.now, sleep=server.custom_jobs.sleep)
    with translate_errors(fallback.place, what="custom job"):
        return fallback.run()


def tried(run: Storage) -> list[tuple[str, str]]:
    attempts = json.loads(run.read("capacity_fallback.json"))["attempts"]
    return [(one["strategy"], one["outcome"]) for one in attempts]


def strategies(server: FakeVertex) -> list[str]:
    return [job.job_spec.scheduling.strategy.name for job in server.custom_jobs.jobs.values()]


def test_the_first_rung_that_finds_machines_trains(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    resources = json.loads(climb(server, run))
    (job,) = server.custom_jobs.jobs.values()
    assert resources["resources"][0]["resourceUri"].endswith(f"/v1/{job.name}")
    assert tried(run) == [("spot", "done")]
    assert (strategies(server), job.display_name) == (["SPOT"], "llava-7b-zero2-spot-train-spot")


def test_a_job_is_watched_on_where_names_are_not_resolved_for_a_while(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    once, faults = retries.send_once, iter(range(6))

    def send(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if method.__name__ == "get_custom_job" and next(faults, None) is not None:
            unknown = NameResolutionError("host", cast(Any, None), socket.gaierror())
            raise NoConnection(MaxRetryError(cast(Any, None), "/", unknown))
        return once(method, *arguments, **named)

    monkeypatch.setattr(retries, "send_once", send)
    climb(server, run)
    assert tried(run) == [("spot", "done")] and next(faults, None) is None


def test_a_job_without_options_needs_no_plan(server: FakeVertex, run: Storage) -> None:
    """As that which encodes the images of a sweep, whose trainings have none."""
    run.delete("plan.json")
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    climb(server, run, config(), "cache_features")
    assert len(server.custom_jobs.jobs) == 1


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
    run.write("run.json", json.dumps(wanted.to_dict()).encode())
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
    run.write("run.json", json.dumps(wanted.to_dict()).encode())
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
    run.write("run.json", (json.dumps(wanted.to_dict()) + "\n").encode())  # resumed
    resources = json.loads(climb(server, run, wanted))["resources"][0]["resourceUri"]
    assert resources.startswith(f"https://us-east1-aiplatform.googleapis.com/v1/{elsewhere}/customJobs/")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.capacity_fallback=[{scheduling_strategy: spot, location: us-central1}, spot]"], "which is gcp.loc"),
        (
            [
                "cluster.capacity_fallback=[spot, {scheduling_strategy: spot, location: us-east1}]",
                "gcp.encryption_spec_key_name=projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
            ],
            r"spot@us-east1 with gcp\.encryption_spec_key_name, which is of us-central1",
        ),
        (
            [
                RESERVED,
                "cluster.capacity_fallback=[{scheduling_strategy: standard, reservation: true, location: us-east1}, "
                "reservation]",
            ],
            "reservation takes no location",
        ),
    ],
)
def test_a_region_that_cannot_help_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RunFileError, match=said):
        config(*overrides)


def test_machines_that_another_region_has_not_are_refused_and_its_price_is_planned() -> None:
    fallback = "cluster.capacity_fallback=[spot, {scheduling_strategy: standard, location: %s}]"
    with pytest.raises(ConfigError, match=r"found NVIDIA_A100_80GB in us-west3.*job train on standard in us-west3"):
        check_jobs(config(fallback % "us-west3"), "gs://bucket/runs/r")
    cost = plan_config(config(fallback % "europe-west4")).cost
    assert cost and list(cost.elsewhere) == ["standard@europe-west4"] and cost.capacity_fallback == ("spot",)
    assert cost.option_numbers == {"spot": 1, "standard@europe-west4": 2}
    assert cost.elsewhere["standard@europe-west4"].usd != cost.by_term["standard"].usd
    assert any("in other regions" in one and "us-central1" in one for one in cost.assumptions)


@pytest.mark.parametrize("job", ["train", "evaluate"])
def test_fields_that_googles_component_lacks_reach_the_api(server: FakeVertex, run: Storage, job: Job) -> None:
    own = ["cluster.disable_retries=true", "cluster.restart_job_on_worker_restart=false"]
    wanted = config("cluster.capacity_fallback=[]", "gcp.enable_dashboard_access=true", *own)
    run.write("run.json", json.dumps(wanted.to_dict()).encode())
    server.custom_jobs.scripts = [[*WAITS, *RUNS]]
    climb(server, run, wanted, job)
    (sent,) = server.custom_jobs.jobs.values()
    assert sent.job_spec.scheduling.disable_retries and sent.job_spec.enable_dashboard_access
    assert sent.display_name == f"llava-7b-zero2-spot-{job}" and strategies(server) == ["SPOT"]
    assert json.loads(run.read(f"vertex_jobs/{job}.json"))["attempts"][0]["outcome"] == "done"


def test_a_job_without_fallback_waits_as_long_as_vertex_lets_it(server: FakeVertex, run: Storage) -> None:
    wanted = config("cluster.capacity_fallback=[]", "cluster.disable_retries=true")
    run.write("run.json", json.dumps(wanted.to_dict()).encode())
    server.custom_jobs.scripts = [[Step("PENDING")] * 700 + RUNS]
    climb(server, run, wanted)
    server.custom_jobs.scripts = [[STOCKOUT]]
    run.write("run.json", (json.dumps(wanted.to_dict()) + "\n").encode())
    with pytest.raises(UserError, match="no machines were found") as caught:
        climb(server, run, wanted)
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_flex_start_without_fallback_ends_when_its_wait_expires(server: FakeVertex, run: Storage) -> None:
    """Google's launcher knows FAILED, CANCELLED and PAUSED: it would ask for this job for ever."""
    flex_start = ["cluster.scheduling_strategy=flex_start", "cluster.max_wait_duration=7200s"]
    wanted = config("cluster.capacity_fallback=[]", *flex_start)
    run.write("run.json", json.dumps(wanted.to_dict()).encode())
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


def test_jobs_carry_the_labels_by_which_costs_are_assigned_to_the_run(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    billing = {"vertex-ai-pipelines-run-billing-id": "123", "vlmpipe-step": "theirs", "bad key": "x", "a": "Big"}
    monkeypatch.setenv(RUN_LABELS_VARIABLE, json.dumps(billing))
    server.custom_jobs.scripts = [[STOCKOUT], RUNS]
    climb(server, run)
    labels = [dict(job.labels) for job in server.custom_jobs.jobs.values()]
    assert [one["vertex-ai-pipelines-run-billing-id"] for one in labels] == ["123", "123"]
    assert labels[0]["vlmpipe-step"] == "train" and not {"bad key", "a"} & labels[0].keys()
    assert "left out: 'a', 'bad key'" in capsys.readouterr().out
    for broken in ("{", '["a"]'):
        monkeypatch.setenv(RUN_LABELS_VARIABLE, broken)
        assert run_labels() == {}
        assert "is no JSON object" in capsys.readouterr().out


def test_the_labels_are_those_of_googles_own_components(monkeypatch: pytest.MonkeyPatch) -> None:
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import gcp_labels_util

    assert gcp_labels_util.SYSTEM_LABEL_ENV_VAR == RUN_LABELS_VARIABLE
    monkeypatch.setenv(RUN_LABELS_VARIABLE, '{"a-b_c": "1", "d": ""}')
    assert run_labels() == gcp_labels_util.attach_system_labels()


def test_a_step_ends_before_vertex_ends_it_and_its_job_not_long_after(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    ended = server.custom_jobs.now + MAX_WATCHED_S

    def an_hour_passes(_: float) -> None:
        server.custom_jobs.now += 3600

    server.custom_jobs.sleep = an_hour_passes  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the pipeline's step that watches it must end after 166 h") as caught:
        climb(server, run, config("cluster.timeout=604800s"))
    (job,) = server.custom_jobs.jobs.values()
    timeout_s = job.job_spec.scheduling.timeout.total_seconds()
    assert caught.value.code == ExitCode.PREEMPTED and tried(run) == [("spot", "stopped")]
    assert MAX_WATCHED_S < timeout_s < 7 * 24 * 3600 and ended <= server.custom_jobs.now < ended + 2 * 3600


def test_a_shorter_timeout_of_the_run_file_stays(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [RUNS]
    climb(server, run, config("cluster.timeout=7200s"))
    (job,) = server.custom_jobs.jobs.values()
    assert job.job_spec.scheduling.timeout.total_seconds() == 7200


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


@pytest.mark.parametrize("action", ["drop_before", "drop_after"])
def test_a_lost_answer_starts_no_second_job(server: FakeVertex, run: Storage, action: Any) -> None:
    server.custom_jobs.scripts = [RUNS]
    server.faults.append(Fault(action))
    climb(server, run)
    assert len(server.custom_jobs.jobs) == 1


def test_a_job_of_which_no_answer_ever_came_is_watched_all_the_same(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [RUNS]
    server.faults += [Fault("drop_before", times=2), Fault("drop_after")]
    climb(server, run)
    assert len(server.custom_jobs.jobs) == 1 and tried(run) == [("spot", "done")]


def test_a_stop_before_the_answer_leaves_no_job_behind(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    server.faults.append(Fault("drop_after"))

    def stop(_: float) -> None:
        raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert sum(f"{job}:cancel" in request for request in server.requests) == 1


def test_too_many_requests_are_no_lack_of_machines(server: FakeVertex, run: Storage) -> None:
    message = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"
    server.faults.append(Fault("status", code=429, message=message, times=3))
    with pytest.raises(UserError, match="per minute"):
        climb(server, run)
    assert not server.custom_jobs.jobs, "the next option would have cost more"


def test_a_job_that_cannot_be_cancelled_is_named(
    server: FakeVertex, run: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]

    def stop(_: float) -> None:
        server.faults.append(Fault("status", code=403, message="no permission"))
        raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert f"{job} could not be cancelled and may still run" in capsys.readouterr().out


def test_a_folder_that_can_no_longer_be_written_leaves_no_job_behind(
    server: FakeVertex, run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    write = type(run).write

    def write_no_job(self: Storage, name: str, data: bytes, **options: Any) -> Any:
        if b"customJobs" in data:
            raise UserError("the bucket is gone", code=ExitCode.UNAVAILABLE)
        return write(self, name, data, **options)

    monkeypatch.setattr(type(run), "write", write_no_job)
    with pytest.raises(UserError, match="the bucket is gone"):
        climb(server, run)
    (job,) = server.custom_jobs.jobs
    assert sum(f"{job}:cancel" in request for request in server.requests) == 1


def test_a_step_that_begins_again_takes_up_the_job_it_left(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[STOCKOUT], RUNS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityFallback, "_watch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(CapacityFallback, "_abandon", lambda *_: None)  # killed, without a chance to cancel
        with pytest.raises(KeyboardInterrupt):
            climb(server, run)
    assert len(server.custom_jobs.jobs) == 1
    climb(server, run)
    assert tried(run) == [("spot", "no capacity"), ("flex_start", "done")]
    assert strategies(server) == ["SPOT", "FLEX_START"]
    run.write("run.json", run.read("run.json") + b"\n")  # the run is continued: it climbs anew
    server.custom_jobs.scripts = [RUNS]
    climb(server, run)
    assert tried(run) == [("spot", "done")]


def test_a_step_that_is_stopped_cancels_its_job(server: FakeVertex, run: Storage) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING")]]
    sleeps = iter(range(3))

    def sleep(_: float) -> None:
        if next(sleeps, None) is None:
            raise UserError("train was stopped on request", code=ExitCode.PREEMPTED)

    server.custom_jobs.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(UserError, match="stopped on request"):
        climb(server, run)
    assert sum(request.endswith(":cancel?%24alt=json%3Benum-encoding%3Dint") for request in server.requests) == 1


# ---- the pipeline, the plan, and what is refused


def test_the_graph_is_the_same_on_both_targets_and_the_step_is_ours(tmp_path: Path) -> None:
    wanted = config()
    specs = {
        target: yaml.safe_load(compile_pipeline(wanted, target, tmp_path / f"{target}.yaml").path.read_text())  # type: ignore[arg-type]
        for target in ("vertex", "local")
    }
    assert shape(specs["vertex"]) == shape(specs["local"])
    labels = {path.rpartition("/")[2]: component["executorLabel"] for path, _, component in all_tasks(specs["vertex"])
              if "executorLabel" in component}  # fmt: skip
    container = specs["vertex"]["deploymentSpec"]["executors"][labels["train"]]["container"]
    assert container["image"] == wanted.gcp.pipeline_image
    assert "run_vertex_job" in str(container)
    assert "run_vertex_job" not in str(specs["local"])
    assert "strategy" in steps(specs["vertex"])["evaluate"]["inputs"]["parameters"]
    assert run_vertex_job.__name__ == "run_vertex_job"


@pytest.mark.parametrize(
    "field",
    ["cluster.disable_retries=true", "gcp.enable_dashboard_access=true", "cluster.scheduling_strategy=flex_start"],
)
def test_jobs_with_such_fields_are_steps_of_ours(tmp_path: Path, field: str) -> None:
    wanted = config("cluster.capacity_fallback=[]", field)
    spec = yaml.safe_load(compile_pipeline(wanted, "vertex", tmp_path / "p.yaml").path.read_text())
    executors = [str(one["container"]) for one in spec["deploymentSpec"]["executors"].values()]
    assert not any("google_cloud_pipeline_components.container" in one for one in executors)
    assert any("run_vertex_job" in one for one in executors)


REFUSALS = {
    "a reservation on Spot": (
        "cluster.capacity_fallback=[{scheduling_strategy: spot, reservation: true}, standard]",
        "reservation needs scheduling_strategy standard",
    ),
    "a reservation without a name": ("cluster.capacity_fallback=[reservation, spot]", "which says which one"),
    "a reservation that nothing uses": (
        "cluster.reservation_affinity={reservation_affinity_type: any_reservation}",
        "add reservation to it",
    ),
    "a specific reservation without a name": (
        "cluster.reservation_affinity={reservation_affinity_type: specific_reservation}",
        "takes at least one",
    ),
    "one option": ("cluster.capacity_fallback=[spot]", "several different"),
    "a option twice": ("cluster.capacity_fallback=[spot, spot]", "several different"),
    "an endless wait before others": (
        "cluster.capacity_fallback=[{scheduling_strategy: spot, wait: 0s}, standard]",
        "only the last option",
    ),
    "persistent machines": ("gcp.persistent_resource_id=mine", "machines exist already"),
    "reducers": ("cluster.reduction_server={replica_count: 2}", "cluster.capacity_fallback flex_start"),
    "too long for flex_start": ("cluster.timeout=700000s", "at most 604800s with flex_start"),
    "no GPU": ("cluster.accelerator_count=0", "flex_start without GPUs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_job_that_one_option_cannot_run_is_refused(name: str) -> None:
    override, said = REFUSALS[name]
    overrides = [override, *(["cluster.accelerator_type="] if name == "no GPU" else [])]
    with pytest.raises(RunFileError, match=said):
        config(*overrides)


def test_every_rung_obeys_the_rules_for_job_specs_and_a_limit_a_ladder() -> None:
    with pytest.raises(ConfigError, match="VP402"):  # a GPU that flex_start does not offer
        check_jobs(config("cluster.machine_type=n1-standard-8", "cluster.accelerator_type=NVIDIA_TESLA_V100",
                          "cluster.accelerator_count=8"), "gs://bucket/run")  # fmt: skip
    with pytest.raises(RunFileError, match="watched by a capacity_fallback only"):
        load_run_file(SPOT_FILE, ["cluster.max_spend_usd=5"])


def test_the_server_refuses_a_job_that_the_api_would(server: FakeVertex) -> None:
    pool = {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": 1, "containerSpec": {"imageUri": "a/b:1"}}
    good = {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool]}}
    bad = [
        {**good, "strategy": "SPOT"},
        {**good, "state": "JOB_STATE_RUNNING"},
        {"displayName": "a"},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [{**pool, "replicaCount": 2}]}},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool], "scheduling": {"strategy": "FLEX_START"}}},
        {"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool], "scheduling": {"maxWaitDuration": "5s"}}},
    ]
    assert [_post(server, "customJobs", body) for body in [good, *bad]] == [200, *[400] * len(bad)]
    assert _post(server, "customJobs/1:cancel", {}) == 404


def _post(server: FakeVertex, path: str, content: object) -> int:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", f"/v1/projects/test-project/locations/us-central1/{path}", json.dumps(content))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_job_whose_program_has_ended_is_cancelled_and_training_is_done(server: FakeVertex, run: Storage) -> None:
    """As a launcher that is stopped, or a frozen container, after "train: done"."""
    record = StepRecord("train", "done", ended_s=server.custom_jobs.now + 5.0)
    write_record(run, "steps/train.json", asdict(record))
    server.custom_jobs.scripts = [[*WAITS, *[Step("RUNNING")] * 60]]
    climb(server, run)
    (job,) = server.custom_jobs.jobs.values()
    assert job.state.name in ("JOB_STATE_CANCELLED", "JOB_STATE_CANCELLING") and tried(run) == [("spot", "done")]
    (attempt,) = json.loads(run.read("capacity_fallback.json"))["attempts"]
    assert attempt["cancelled_for"] == "end" and "train has recorded its end" in attempt["why"]


def test_the_end_of_an_earlier_job_ends_no_later_one(server: FakeVertex, run: Storage) -> None:
    """A finished run that trains on: its record is the old one for as long as machines are waited for."""
    record = StepRecord("train", "done", ended_s=server.custom_jobs.now - 5.0)
    write_record(run, "steps/train.json", asdict(record))
    server.custom_jobs.scripts = [[*[Step("QUEUED")] * 60, *RUNS]]
    run.write("run.json", json.dumps(config("cluster.capacity_fallback=[]").to_dict()).encode())
    climb(server, run, config("cluster.capacity_fallback=[]"))
    (job,) = server.custom_jobs.jobs.values()
    assert job.state.name == "JOB_STATE_SUCCEEDED"
