"""The job step on Kubeflow, from its inputs to its exit code, with the real Kubernetes client and a strict fake API."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubernetes.api import FakeKubernetes
from tests.fakes.kubernetes.pods import Course, Scene, life_of, pod
from tests.support.pipelines.kubeflow_steps import inputs, run_folder, start_step, step_record
from tests.support.pipelines.train_jobs import STORED, made, pools
from vlmpipe.platforms.job_step import run_custom_job
from vlmpipe.platforms.jobs import finished_program
from vlmpipe.platforms.kubeflow.jobs import watch as train_job_watch
from vlmpipe.platforms.kubeflow.jobs.status import nodes_of
from vlmpipe.trainer.errors import ExitCode

pytestmark = pytest.mark.timeout(120)

RUNNING: dict[str, Any] = {"running": {}}
COMPLETE = Scene([("Complete", "AllJobsCompleted", "jobset completed successfully")], [pod(0, state=RUNNING)])
FAILED = ("Failed", "FailedJobs", "jobset failed due to one or more job failures")


def ended(code: int, rank: int = 0, reason: str = "Error") -> dict[str, Any]:
    return pod(rank, state={"terminated": {"exitCode": code, "reason": reason}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    for name, seconds in {"FIRST_POLL_S": 0.01, "LONGEST_POLL_S": 0.02}.items():
        monkeypatch.setattr(train_job_watch, name, seconds)
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    with FakeKubernetes() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


Fails = Callable[[], tuple[int, str]]


@pytest.fixture
def fails(run: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run the step, which must fail: its exit code, and what it said on stderr."""

    def failing() -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            run_custom_job("kubeflow", **inputs(run))
        return int(str(stopped.value.code)), capsys.readouterr().err

    return failing


def test_a_job_is_created_watched_and_named_in_the_output(
    cluster: FakeKubernetes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = Scene(pods=[pod(rank, unscheduled="0/3 nodes are available") for rank in (0, 1)])
    trains = Scene(pods=[pod(rank, state=RUNNING) for rank in (0, 1)], logs={"pod-0": ["step 1"], "pod-1": ["step 1"]})
    done = Scene(COMPLETE.conditions, trains.pods, {"pod-0": ["step 1", "step 2"], "pod-1": ["step 1"]})
    cluster.runs = [Course([Scene([("Suspended", "Suspended", "TrainJob is suspended")]), waits, waits, trains, done])]
    (resources,) = run_custom_job("kubeflow", **inputs(run, nodes=2))
    (name,) = cluster.jobs
    uri = f"apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/{name}"
    assert json.loads(resources) == {"resources": [{"resourceType": "TrainJob", "resourceUri": uri}]}
    assert capsys.readouterr().out.splitlines() == [
        f"TrainJob {name} created in namespace team: 2 nodes x 1",
        "suspended: Suspended: TrainJob is suspended",
        "pod-0 waits: Unschedulable: 0/3 nodes are available",
        "pod-1 waits: Unschedulable: 0/3 nodes are available",
        "waiting for the nodes",
        "[pod-0] step 1",
        "[pod-0] step 2",
        "complete",
    ]
    assert (step_record(run)["state"], step_record(run)["detail"]) == ("done", {"exit_code": 0})


def test_the_run_files_section_and_the_machine_type_reach_the_job(cluster: FakeKubernetes, tmp_path: Path) -> None:
    section = {"runtime": "ours", "service_account": "trainer", "queue": "q", "node_selector": {"pool": "gpu"}}
    run = run_folder(tmp_path / "of section", section)
    cluster.runtimes, cluster.runs = {"ours"}, [Course([COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    (job,) = cluster.jobs.values()
    assert job["spec"]["runtimeRef"]["name"] == "ours"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert '"serviceAccountName": "trainer", "nodeSelector": {"pool": "gpu"}' in json.dumps(job)
    assert job["spec"]["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "7000m", "memory": "24576Mi"}}  # of 8, 30


def test_a_reduction_server_is_left_out_with_a_notice(
    cluster: FakeKubernetes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.runs = [Course([COMPLETE])]
    run_custom_job("kubeflow", **inputs(run, nodes=2, reducers=3))
    (job,) = cluster.jobs.values()
    assert job["spec"]["trainer"]["numNodes"] == 2 and "Reduction Server" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scene", "code", "said"),
    [
        (Scene([FAILED], [ended(1), ended(65, 1)], {"pod-1": ["error: bad sample", "  expected: a good one"]}), 65,
         "error: bad sample\n  expected: a good one\n  where:    replica pod-1, exit code 65 (data)"),
        (Scene([FAILED], [ended(137, reason="OOMKilled")]), 137, "pod-0 was killed for lack of memory"),
        (Scene([FAILED], [ended(1)]), 1, "replica pod-0 ended with exit code 1"),
        (Scene([FAILED], []), 1, "failed: FailedJobs: jobset failed due to one or more job failures"),
        (Scene([("Failed", "DeadlineExceeded", "x")], [ended(143)]), 1, "longer than its timeout of 3600 s"),
    ],
    ids=["a named cause", "out of memory", "no words", "pods are gone", "too long"],
)  # fmt: skip
def test_a_failed_job_ends_the_step_with_its_exit_code_and_words(
    cluster: FakeKubernetes, run: Path, fails: Fails, scene: Scene, code: int, said: str
) -> None:
    cluster.runs = [Course([Scene(pods=[pod(0, state=RUNNING)]), scene])]
    found, words = fails()
    assert found == code and said in words
    assert step_record(run)["state"] == "failed" and step_record(run)["detail"]["exit_code"] == code


def test_a_lasting_cause_ends_the_job_before_kubernetes_starts_the_node_again(
    cluster: FakeKubernetes, fails: Fails
) -> None:
    again = pod(0, state=RUNNING, last={"terminated": {"exitCode": 64}}, restarts=1)
    logs = {"pod-0 previous": ["error: train.epochs is 0"], "pod-0": ["starting"]}
    cluster.runs = [Course([Scene(pods=[again], logs=logs)])]
    code, words = fails()
    assert (code, cluster.jobs) == (64, {}) and "error: train.epochs is 0" in words


def test_a_node_that_is_restarted_and_then_completes_is_no_failure(cluster: FakeKubernetes, run: Path) -> None:
    again = pod(0, state=RUNNING, last={"terminated": {"exitCode": 137}}, restarts=1)
    cluster.runs = [Course([Scene(pods=[again], logs={"pod-0": []}), COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    assert step_record(run)["state"] == "done"


@pytest.mark.parametrize(
    ("reason", "message", "remedy"),
    [
        ("ImagePullBackOff", "not found", "correct cluster.image_uri, or give the cluster access"),
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "kubeflow.runtime"),
    ],
)
def test_an_image_that_cannot_be_started_ends_the_job_after_a_while(
    cluster: FakeKubernetes, fails: Fails, monkeypatch: pytest.MonkeyPatch, reason: str, message: str, remedy: str
) -> None:
    monkeypatch.setattr(train_job_watch, "STUCK_S", 0.05)
    waiting = {"waiting": {"reason": reason, "message": message}}
    cluster.runs = [Course([Scene(pods=[pod(0, state=waiting)])])]
    code, words = fails()
    assert (code, cluster.jobs) == (ExitCode.UNAVAILABLE, {})
    assert f"pod-0 cannot start: {reason}: {message}" in words and remedy in words and "secret_env" not in words


def test_a_step_that_is_tried_again_watches_the_job_that_is_there(cluster: FakeKubernetes, run: Path) -> None:
    cluster.runs = [Course([COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    before = json.loads((run / "steps/train.json").read_text())
    run_custom_job("kubeflow", **inputs(run))
    assert len([one for one in cluster.requests if one.startswith("POST")]) == 1
    assert json.loads((run / "steps/train.json").read_text()) == before, "what the job left is not touched"


def test_a_failed_job_is_deleted_and_created_again(cluster: FakeKubernetes, run: Path, fails: Fails) -> None:
    cluster.runs, cluster.deletions_take = [Course([Scene([FAILED], [ended(1)])]), Course([COMPLETE])], 3
    assert fails()[0] == 1
    run_custom_job("kubeflow", **inputs(run))
    sent = [one.split()[0] for one in cluster.requests if "/trainjobs" in one and not one.startswith("GET")]
    assert sent == ["POST", "DELETE", "POST"]


def test_a_restarted_run_gets_a_job_of_its_own(cluster: FakeKubernetes, run: Path) -> None:
    cluster.runs = [Course([COMPLETE]), Course([COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    (run / "steps/resolve-run.json").write_text('{"started_s": 99.0}')
    run_custom_job("kubeflow", **inputs(run))
    assert len(cluster.jobs) == 2


def test_an_answer_that_is_lost_creates_no_second_job(cluster: FakeKubernetes, run: Path) -> None:
    cluster.runs = [Course([COMPLETE])]
    cluster.faults = [("GET", 503), ("POST", 503), ("POST", 0)]  # the last is done and not answered
    run_custom_job("kubeflow", **inputs(run))
    assert len(cluster.jobs) == 1
    assert [one.split()[0] for one in cluster.requests].count("POST") == 3, "and the third one met the second's job"


def test_a_job_deleted_from_outside_is_stopped_and_resumable(cluster: FakeKubernetes, fails: Fails) -> None:
    cluster.runs = [Course([Scene(pods=[pod(0, state=RUNNING)]), Scene(deleted=True)])]
    code, words = fails()
    assert code == ExitCode.PREEMPTED and "deleted from outside" in words


def test_without_kubeflow_trainer_the_step_reports_it(cluster: FakeKubernetes, fails: Fails) -> None:
    cluster.installed = False
    code, words = fails()
    assert code == ExitCode.NOT_FOUND and "expected: Kubeflow Trainer 2.3 or newer" in words


def test_an_older_trainer_that_would_drop_fields_is_recognised(cluster: FakeKubernetes, fails: Fails) -> None:
    cluster.lacks = {"terminationGracePeriodSeconds"}  # as 2.2, whose types of pods have all other fields
    code, words = fails()
    assert (code, cluster.jobs) == (ExitCode.CONFIG, {})
    assert "terminationGracePeriodSeconds" in words and "expected: Kubeflow Trainer 2.3 or newer" in words
    assert "to do:    have Kubeflow Trainer updated" in words


@pytest.mark.parametrize(
    ("there", "why"),
    [({}, 'secret "tracker" not found'), ({"tracker": {"other": "x"}}, "couldn't find key token in Secret tracker")],
)
def test_a_secret_that_is_not_there_ends_the_step_and_is_named(
    cluster: FakeKubernetes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    there: dict[str, dict[str, str]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The API takes such a job: it is its pods that cannot start."""
    monkeypatch.setattr(train_job_watch, "STUCK_S", 0.05)
    run, cluster.secrets = run_folder(tmp_path / "of section", {"secret_env": {"TOKEN": "tracker/token"}}), there
    with pytest.raises(SystemExit) as stopped:
        run_custom_job("kubeflow", **inputs(run))
    words = capsys.readouterr().err
    assert stopped.value.code == ExitCode.UNAVAILABLE and f"CreateContainerConfigError: {why}" in words
    assert "correct kubeflow.secret_env, or make that secret in namespace team" in words


def test_pods_whose_claim_is_not_there_say_why_they_wait() -> None:
    job = made(pools(1), STORED)
    (node,) = nodes_of(life_of(job, {"minio": {"accesskey": "a", "secretkey": "b"}}, claims=set()).pods())
    assert 'persistentvolumeclaim "team-data" not found' in node.waits and not node.stuck


WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "digits-x7k2p", "uid": "u-1"}


@pytest.mark.parametrize(("kept", "owners"), [(True, [WORKFLOW]), (False, None)], ids=["there", "gone"])
def test_the_job_is_owned_by_the_workflow_of_its_step(
    cluster: FakeKubernetes, run: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, owners: Any
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "step")
    cluster.step_pods = {"step": WORKFLOW | {"controller": True, "blockOwnerDeletion": True}} if kept else {}
    cluster.runs = [Course([COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    (job,) = cluster.jobs.values()
    assert job["metadata"].get("ownerReferences") == owners


@pytest.mark.parametrize("verb", ["create trainjobs", "get trainjobs", "list pods", "get pods"])
def test_without_the_role_nothing_is_created_and_the_role_is_named(
    cluster: FakeKubernetes, fails: Fails, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "step")
    cluster.step_pods = {"step": WORKFLOW}
    cluster.allowed -= {verb}
    code, words = fails()
    assert (code, cluster.jobs) == (ExitCode.NO_PERMISSION, {})
    assert "role vlmpipe-jobs" in words and f"cannot {verb.split()[0]} resource" in words


def test_a_log_that_may_not_be_read_does_not_end_the_job(
    cluster: FakeKubernetes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.allowed -= {"get pods/log"}
    cluster.runs = [Course([Scene(pods=[pod(0, state=RUNNING)], logs={"pod-0": ["x"]}), COMPLETE])]
    run_custom_job("kubeflow", **inputs(run))
    assert capsys.readouterr().out.count("the log is not shown: not allowed to read the log of") == 1


def test_a_runtime_that_is_not_there_is_no_matter_of_permission(cluster: FakeKubernetes, fails: Fails) -> None:
    cluster.runtimes = set()
    code, words = fails()
    assert code == ExitCode.CONFIG and "must be created before the TrainJob" in words


def test_an_api_that_does_not_answer_is_unavailable(
    cluster: FakeKubernetes, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job_watch, "FIRST_CONTACT_S", 0.05)
    cluster.faults = [("GET", 503)] * 1000
    code, words = fails()
    assert code == ExitCode.UNAVAILABLE and "the Kubernetes API answers 503" in words


def test_a_request_to_stop_deletes_the_job(cluster: FakeKubernetes, run: Path) -> None:
    cluster.runs = [Course([Scene(pods=[pod(0, state=RUNNING)], logs={"pod-0": ["ready"]})])]
    step = start_step(inputs(run))
    assert step.stdout and any("ready" in line for line in step.stdout)
    assert cluster.jobs
    step.send_signal(signal.SIGTERM)
    said = step.communicate(timeout=60)[0]
    assert (step.returncode, cluster.jobs) == (ExitCode.PREEMPTED, {}), said
    assert step_record(run)["state"] == "stopped"


def test_a_job_whose_program_has_ended_is_deleted_and_its_step_is_done(
    cluster: FakeKubernetes, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a launcher that is stopped, or a frozen container, after "train: done"."""
    monkeypatch.setattr(finished_program, "LOOK_S", 0.0)
    monkeypatch.setattr(finished_program, "LINGERS_S", 0.05)
    monkeypatch.setattr(finished_program.FinishedProgram, "_recorded_end", lambda _: 5.0)
    cluster.runs = [Course([Scene(pods=[pod(0, state=RUNNING)], logs={"pod-0": ["train: done"]})])]
    run_custom_job("kubeflow", **inputs(run))
    assert cluster.jobs == {} and step_record(run)["state"] == "done"
    assert "train has recorded its end, and its job has not ended for 0.05 s" in capsys.readouterr().out
