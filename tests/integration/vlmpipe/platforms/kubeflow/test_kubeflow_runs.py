"""`vlmpipe submit --target kubeflow`, `status`, `logs`, `cancel` and `diagnose`, by kfp's own client against a strict
stand-in of Kubeflow Pipelines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kfp_server_api
import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.kubeflow_pipelines import FakePipelines
from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.clock import replace_time
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex
from tests.support.vertex.submit_runs import APPROVED, Submit
from vlmpipe.platforms.kubeflow import run as kubeflow_platform_run
from vlmpipe.platforms.kubeflow.runs.client import TOKEN_VARIABLE, KubeflowRuns
from vlmpipe.platforms.kubeflow.runs.logs import step_name
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun, kubeflow_run
from vlmpipe.runs import watch
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import StepRecord

pytest_plugins = ("tests.support.vertex.fixtures",)
DIGITS = str(ROOT / "configs/digits.yaml")
FREE = "plan.machine.usd_per_hour=0"
SUBMIT = ("submit", DIGITS, *for_vertex(), "cluster.replica_count=1", FREE, "--target", "kubeflow")


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePipelines]:
    monkeypatch.setattr(watch, "SERVICE_POLL_S", 0.0)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with FakePipelines() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path)))
        yield running


@pytest.fixture
def run(pipelines: FakePipelines, bucket: FakeGcs, vlmpipe: Submit) -> KubeflowRun:
    """A run that was submitted."""
    answer = vlmpipe(*SUBMIT, "--detach", "--json")
    assert answer.code == 0, answer.err
    (record,) = Path("build/submitted").glob("*.json")
    found = kubeflow_run(record.stem)
    assert found
    return found


def put(bucket: FakeGcs, run: KubeflowRun, name: str, content: Any) -> None:
    path = f"{run.run_uri.removeprefix('gs://example-bucket/')}/{name}"
    bucket.client().bucket("example-bucket").blob(path).upload_from_string(json.dumps(content), checksum="crc32c")


def put_record(bucket: FakeGcs, run: KubeflowRun, step: str, state: str, **fields: Any) -> None:
    put(bucket, run, f"steps/{step}.json", asdict(StepRecord(step, state, **fields)))


def task(run_id: str, number: int, name: str, state: str, *, pod: str = "", error: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"run_id": run_id, "task_id": f"t{number}", "display_name": name, "state": state}
    if error:
        found["error"] = {"code": 2, "message": error}
    return found | ({"child_tasks": [{"pod_name": pod}]} if pod else {})


# ---- starting


def test_a_run_is_started_with_its_name_as_its_folder(pipelines: FakePipelines, run: KubeflowRun) -> None:
    (sent,) = pipelines.runs.values()
    assert sent["display_name"] == run.name
    assert sent["runtime_config"]["parameters"] == {"run_id": run.name}
    assert run.run_uri == f"gs://example-bucket/vlmpipe/runs/{run.name}"
    assert (run.run_id, run.endpoint) == (sent["run_id"], pipelines.endpoint)
    (experiment,) = pipelines.experiments.values()
    assert experiment["display_name"] == "vlmpipe"


def test_the_second_run_belongs_to_the_same_experiment(
    pipelines: FakePipelines, run: KubeflowRun, vlmpipe: Submit
) -> None:
    answer = vlmpipe(*SUBMIT, "--detach", "--run-id", run.name, "--json")
    assert (answer.code, answer.json["sent"], answer.json["run_uri"]) == (0, True, run.run_uri)
    assert len(pipelines.experiments) == 1 and len(pipelines.runs) == 2


def test_machines_without_a_price_need_a_yes(pipelines: FakePipelines, bucket: FakeGcs, vlmpipe: Submit) -> None:
    unpriced = tuple(argument for argument in SUBMIT if argument != FREE)
    asked = vlmpipe(*unpriced, "--detach")
    assert (asked.code, pipelines.runs) == (64, {})
    assert "plan.machine.usd_per_hour states one" in asked.err and "add --yes" in asked.err
    dry = vlmpipe(*unpriced, "--dry-run", "--json")
    assert dry.code == 0 and "machines of your own have no price" in dry.json["plan"]["needs_a_yes"]
    assert vlmpipe(*unpriced, "--detach", "--yes", "--json").json["sent"] is True


def test_a_dry_run_sends_nothing(pipelines: FakePipelines, bucket: FakeGcs, vlmpipe: Submit) -> None:
    answer = vlmpipe(*SUBMIT, "--dry-run", "--json")
    assert (answer.code, answer.json["sent"], answer.json["endpoint"]) == (0, False, pipelines.endpoint)
    assert pipelines.requests == [] and not Path("build/submitted").exists()
    assert Path(answer.json["pipeline"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--only", "train"], 64, "--only is given with --target kubeflow"),
        (["output.root_uri=runs", "gcp.pipeline_root=runs"], 64, "pods share no other"),
        (["data.source=my.json"], 64, "a job does not see this machine's files"),
    ],
)
def test_what_could_not_run_there_is_refused(
    pipelines: FakePipelines, vlmpipe: Submit, arguments: list[str], code: int, said: str
) -> None:
    fields = {argument.partition("=")[0] for argument in arguments}
    others = [argument for argument in SUBMIT if argument.partition("=")[0] not in fields]
    answer = vlmpipe(*others, *arguments)
    assert answer.code == code and said in answer.err
    assert pipelines.runs == {}


def test_without_an_address_the_error_says_where_to_give_it(
    bucket: FakeGcs, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT", raising=False)
    answer = vlmpipe(*SUBMIT)
    assert answer.code == 64 and "kubeflow.endpoint and KF_PIPELINES_ENDPOINT are empty" in answer.err


def test_an_id_that_leads_out_of_the_runs_folder_is_refused_before_anything_is_sent(
    pipelines: FakePipelines, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    answer = vlmpipe(*SUBMIT, "--detach", "--run-id", "a/../b")
    assert answer.code == 64 and "run_id is 'a/../b'" in answer.err and not pipelines.requests


def test_errors_of_the_service_have_codes_of_their_own(
    pipelines: FakePipelines, bucket: FakeGcs, vlmpipe: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipelines.token = "secret-token"
    denied = vlmpipe(*SUBMIT, "--detach")
    assert denied.code == 77 and "no user identity" in denied.err
    token = tmp_path / "token"
    token.write_text("secret-token")
    monkeypatch.setenv(TOKEN_VARIABLE, str(token))
    assert vlmpipe(*SUBMIT, "--detach").code == 0
    pipelines.faults = [503]
    assert vlmpipe(*SUBMIT, "--detach").code == 69
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://127.0.0.1:9")
    gone = vlmpipe(*SUBMIT, "--detach")
    assert gone.code == 69 and "http://127.0.0.1:9" in gone.err


def test_a_kubeflow_for_several_users_needs_a_namespace(bucket: FakeGcs, vlmpipe: Submit) -> None:
    with FakePipelines(multi_user=True) as server:
        endpoint = f"kubeflow.endpoint={server.endpoint}"
        assert vlmpipe(*SUBMIT, endpoint, "kubeflow.namespace=team", "--detach").code == 0
        (experiment,) = server.experiments.values()
        assert experiment["namespace"] == "team"
        (record,) = Path("build/submitted").glob("*.json")
        found = kubeflow_run(record.stem)
        assert found and found.namespace == "team"


# ---- reading


def test_a_run_under_way_shows_its_steps(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, vlmpipe: Submit
) -> None:
    pipelines.move(run.run_id, "RUNNING")
    put_record(bucket, run, "resolve-run", "done", ended_s=time.time())
    put_record(bucket, run, "train", "running", done=30, total=120, unit="steps")
    answer = vlmpipe("status", run.name, "--json")
    states = {one["name"]: one["state"] for one in answer.json["steps"]}
    assert (answer.code, answer.json["outcome"], answer.json["exit_code"]) == (0, "running", None)
    assert (states["resolve-run"], states["train"], states["evaluate"]) == ("done", "running", "waiting")
    assert answer.json["resource_name"] == run.link
    said = vlmpipe("status", run.name).out
    assert "Running on Kubeflow" in said and f"vlmpipe cancel {run.name}" in said and run.link in said


def test_a_run_is_found_by_the_link_to_its_page(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, vlmpipe: Submit
) -> None:
    pipelines.move(run.run_id, "RUNNING")
    answer = vlmpipe("status", run.link, "--json")
    assert (answer.code, answer.json["run_uri"]) == (0, run.run_uri)
    other = run.link.replace(run.run_id, "0" * 8 + run.run_id[8:])
    assert vlmpipe("status", other).code == 66


def test_a_watched_run_ends_with_its_results(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, vlmpipe: Submit
) -> None:
    for step in ("resolve-run", "prepare-data", "cache-features", "train", "sync-checkpoint", "evaluate", "decide"):
        put_record(bucket, run, step, "done", ended_s=time.time())
    put(bucket, run, "evaluate.json", {"exact_match": 0.93, "questions": 100, "chance": 0.1})
    put(bucket, run, "decision.json", {"accepted": False, "reason": "exact match 0.93 is below 0.95"})
    pipelines.move(run.run_id, "SUCCEEDED")
    answer = vlmpipe("status", run.name, "--watch", "--plain")
    assert answer.code == 0 and "93.0 %" in answer.out and "0.93 is below 0.95" in answer.out
    assert vlmpipe("status", run.name, "--watch", "--fail-on-reject").code == 76


def test_a_failed_run_has_the_exit_code_of_its_step(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, cluster: FakeKubernetes, vlmpipe: Submit
) -> None:
    put_record(bucket, run, "prepare-data", "failed", ended_s=time.time(), message="no image could be read",
               detail={"exit_code": 65, "error": "no image could be read"})  # fmt: skip
    pipelines.move(run.run_id, "FAILED", error="step prepare-data failed")
    answer = vlmpipe("status", run.name, "--watch", "--json")
    assert (answer.code, answer.json["exit_code"], answer.json["error"]) == (65, 65, "step prepare-data failed")
    found = vlmpipe("diagnose", run.name, "--json")
    assert (found.json["outcome"], found.json["step"], found.json["exit_code"]) == ("failed", "prepare-data", 65)


def test_a_run_that_left_no_record_has_the_service_s_error(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, vlmpipe: Submit
) -> None:
    failed = task(run.run_id, 1, "Resolve run", "FAILED", error="ImagePullBackOff: no such image")
    pipelines.move(run.run_id, "FAILED", tasks=[failed])
    answer = vlmpipe("status", run.name, "--json")
    assert answer.json["error"] == "Resolve run: ImagePullBackOff: no such image"
    assert answer.json["exit_code"] == 1


# ---- logs


def test_logs_are_those_of_the_run_s_pods_with_the_names_of_their_steps(
    pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, cluster: FakeKubernetes, vlmpipe: Submit
) -> None:
    tasks = [
        task(run.run_id, 1, "Prepare data", "SUCCEEDED", pod="wf-1"),
        task(run.run_id, 2, "Train", "RUNNING", pod="wf-2"),
    ]
    pipelines.move(run.run_id, "RUNNING", tasks=tasks)
    cluster.run_pods[run.run_id] = {
        "wf-1": [("2026-11-27T05:00:00.1Z", "60 samples"), ("2026-11-27T05:00:09.5Z", "done")],
        "wf-2": [("2026-11-27T05:00:05.0Z", "step 1")],
        "wf-3": None,
    }
    answer = vlmpipe("logs", run.name)
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "2026-11-27T05:00:00 [prepare-data] 60 samples",
        "2026-11-27T05:00:05 [train] step 1",
        "2026-11-27T05:00:09 [prepare-data] done",
    ]
    one = vlmpipe("logs", run.name, "--step", "train", "--json")
    assert [json.loads(line)["text"] for line in one.out.splitlines()] == ["step 1"]
    cluster.allowed -= {"get pods/log"}
    assert vlmpipe("logs", run.name).code == 77


def test_followed_logs_print_each_line_once_until_the_end(
    pipelines: FakePipelines,
    bucket: FakeGcs,
    run: KubeflowRun,
    cluster: FakeKubernetes,
    vlmpipe: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a pod that begins meanwhile, and where a fraction of a second has fewer digits than the one before."""
    tasks = [
        task(run.run_id, 1, "Train", "RUNNING", pod="wf-1"),
        task(run.run_id, 2, "Evaluate", "RUNNING", pod="wf-2"),
    ]
    pipelines.move(run.run_id, "RUNNING", tasks=tasks)
    printed = [("2026-11-27T05:00:00.98Z", "step 1"), ("2026-11-27T05:00:00.981Z", "step 2")]
    cluster.run_pods[run.run_id] = {"wf-1": printed, "wf-2": None}
    waits: list[float] = []

    def go_on(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            printed.append(("2026-11-27T05:00:00.9815Z", "step 3"))
        else:
            printed.append(("2026-11-27T05:00:01Z", "done"))
            cluster.run_pods[run.run_id]["wf-2"] = [("2026-11-27T05:00:02Z", "exact match 0.9")]
            pipelines.move(run.run_id, "SUCCEEDED", tasks=tasks)

    replace_time(monkeypatch, kubeflow_platform_run, sleep=go_on)
    answer = vlmpipe("logs", run.name, "--follow", "--last", "1")
    assert (answer.code, len(waits)) == (0, 2)
    assert answer.out.splitlines() == [
        "2026-11-27T05:00:00 [train] step 2",
        "2026-11-27T05:00:00 [train] step 3",
        "2026-11-27T05:00:01 [train] done",
        "2026-11-27T05:00:02 [evaluate] exact match 0.9",
    ]


@pytest.mark.parametrize(
    ("display_name", "step"), [("Sync checkpoint", "sync-checkpoint"), ("Base: prepare data", "base-prepare-data")]
)
def test_a_step_s_name_follows_from_its_display_name(display_name: str, step: str) -> None:
    assert step_name(display_name) == step


# ---- cancelling


def test_a_run_is_cancelled_once(pipelines: FakePipelines, bucket: FakeGcs, run: KubeflowRun, vlmpipe: Submit) -> None:
    pipelines.move(run.run_id, "RUNNING")
    first, second = vlmpipe("cancel", run.name, "--json"), vlmpipe("cancel", run.name, "--json")
    assert (first.json["asked"], second.json["asked"]) == (True, False)
    assert pipelines.runs[run.run_id]["state"] == "CANCELING"
    pipelines.move(run.run_id, "CANCELED")
    assert vlmpipe("status", run.name, "--watch").code == 75
    pipelines.move(run.run_id, "SUCCEEDED")
    over = vlmpipe("cancel", run.name)
    assert over.code == 64 and "nothing to cancel" in over.err


# ---- the stand-in is strict


def test_the_stand_in_refuses_what_the_service_refuses(pipelines: FakePipelines, tmp_path: Path) -> None:
    configuration = kfp_server_api.Configuration(host=pipelines.endpoint)
    api = kfp_server_api.ApiClient(configuration)

    def refused(method: str, path: str, body: dict[str, Any] | None = None) -> int:
        with pytest.raises(kfp_server_api.ApiException) as caught:
            api.call_api(path, method, body=body, header_params={"Content-Type": "application/json"})
        return int(caught.value.status)

    made = "/apis/v2beta1/experiments"
    assert refused("POST", made, {"display_name": "x", "colour": "red"}) == 400
    assert refused("POST", made, {}) == 400
    runs = KubeflowRuns(pipelines.endpoint)
    package = tmp_path / "pipeline.yaml"
    package.write_text("components: {}\nroot: {}\n")
    runs.start(package, APPROVED, name="x", experiment="e", parameters={})
    with pytest.raises(UserError, match="parameter colour is not part of the pipeline"):
        runs.start(package, APPROVED, name="x", experiment="e", parameters={"colour": "red"})
    (experiment,) = pipelines.experiments
    base = {"experiment_id": experiment, "display_name": "x"}
    runs_path = "/apis/v2beta1/runs"
    assert refused("POST", runs_path, {**base, "pipeline_spec": {"no": "field"}}) == 400
    assert refused("POST", runs_path, {**base, "state": "SUCCEEDED"}) == 400
    assert refused("POST", runs_path, {"experiment_id": "none", "display_name": "x"}) == 404
    given = {**base, "pipeline_spec": {"root": {}}, "runtime_config": {"parameters": {"run_id": "x"}}}
    assert refused("POST", runs_path, given) == 400
    assert refused("GET", f"{runs_path}/none") == 404
    assert refused("DELETE", f"{runs_path}/none") in (404, 501)
    assert refused("GET", "/apis/v2beta1/pipelines") == 501
