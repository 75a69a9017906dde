"""Local jobs run real processes here: small scripts stand where a container's command would be.

Each script holds the write end of a FIFO, and so does all it starts. The FIFO's reader meets the end of the file at the
moment the last of them is gone, so "nothing is left behind" is waited for without polling.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.receiver import Receiver
from tests.fakes.replicas import pool, record, run, run_failing, spec
from vlmpipe.trainer.errors import ConfigError, ExitCode
from vlmpipe.trainer.redaction import HIDDEN, SECRETS_VARIABLE
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

pytestmark = pytest.mark.timeout(60)

WRITE_ENVIRONMENT = '(here / f"{name}.json").write_text(json.dumps(dict(os.environ)))'
HOLD = "signal.pause()"


def test_replicas_get_the_run_files_secrets_and_their_logs_hide_them(
    tmp_path: Path, alive: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "projects/p/secrets/tracker/versions/1"
    for variable in ("TRACKER", "MINE", SECRETS_VARIABLE):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("MINE", "sesame open")
    write_record(LocalStorage(tmp_path / "run"), "run.json", {"secrets": {"TRACKER": name, "MINE": name}})
    with Receiver() as receiver:
        receiver.secrets[name] = "correct horse"
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.endpoint)
        run(spec(tmp_path, pool(tmp_path, 'print("got", os.environ["TRACKER"], "and", os.environ["MINE"])')))
        assert receiver.asked == [name], "once for the machine, and not for a variable that is there"
    (log,) = (tmp_path / "run").rglob("workerpool0-0.log")
    shown = f"got {HIDDEN} and {HIDDEN}"
    assert shown in log.read_text() and shown in capsys.readouterr().out


def test_each_replica_sees_the_environment_that_vertex_sets(
    tmp_path: Path, alive: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for leaked in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "AIP_MODEL_DIR", "_KFP_RUNTIME"):
        monkeypatch.setenv(leaked, "from outside")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = [{"name": "FROM_SPEC", "value": "yes"}]
    reducers = pool(tmp_path, "", 3.0)
    reducers["container_spec"] = {"image_uri": "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"}
    pools = pool(tmp_path, WRITE_ENVIRONMENT, env=env), pool(tmp_path, WRITE_ENVIRONMENT, 2.0), reducers
    resources = json.loads(run(spec(tmp_path, *pools)))

    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("workerpool*.json")}
    assert set(seen) == {"workerpool0-0", "workerpool1-0", "workerpool1-1"}, "reducers are named, not started"
    chief = json.loads(seen["workerpool0-0"]["CLUSTER_SPEC"])
    assert {name: len(hosts) for name, hosts in chief["cluster"].items()} == {
        "workerpool0": 1, "workerpool1": 2, "workerpool2": 3
    }  # fmt: skip
    addresses = [address for hosts in chief["cluster"].values() for address in hosts]
    assert len(set(addresses)) == 6 and all(address.startswith("localhost:") for address in addresses)
    assert chief["environment"] == "cloud" and chief["task"] == {"type": "workerpool0", "index": 0, "trial": ""}
    assert chief["job"]["worker_pool_specs"][1]["replica_count"] == "2"

    last = seen["workerpool1-1"]
    assert json.loads(last["CLUSTER_SPEC"])["cluster"] == chief["cluster"]
    assert json.loads(last["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert sorted(json.loads(last["TF_CONFIG"])["cluster"]) == ["chief", "ps", "worker"]
    assert [seen[name]["RANK"] for name in sorted(seen)] == ["0", "1", "2"], "RANK counts nodes"
    assert last["WORLD_SIZE"] == "3", "reducers are no nodes"
    assert f"{last['MASTER_ADDR']}:{last['MASTER_PORT']}" == chief["cluster"]["workerpool0"][0]
    base = str(tmp_path / "run")
    assert last["AIP_MODEL_DIR"] == f"{base}/model/" and last["AIP_CHECKPOINT_DIR"] == f"{base}/checkpoints/"
    assert last["AIP_TENSORBOARD_LOG_DIR"] == f"{base}/logs/"
    assert last["CLOUD_ML_JOB_ID"].isdigit() and int(last["OMP_NUM_THREADS"]) >= 1
    assert seen["workerpool0-0"]["FROM_SPEC"] == "yes" and "FROM_SPEC" not in last
    assert not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID", "_KFP_RUNTIME"} & set(last)

    assert "[workerpool2-0] Reduction Server: named in CLUSTER_SPEC, not started" in capsys.readouterr().out
    assert resources["resources"][0]["resourceUri"] == f"{base}/logs/train"
    assert record(tmp_path)["state"] == "done" and record(tmp_path)["detail"]["exit_code"] == 0


def test_a_job_of_one_replica_has_no_tf_config(tmp_path: Path, alive: int) -> None:
    run(spec(tmp_path, pool(tmp_path, WRITE_ENVIRONMENT)))
    environment = json.loads((tmp_path / "workerpool0-0.json").read_text())
    assert "TF_CONFIG" not in environment and "CLUSTER_SPEC" in environment and environment["WORLD_SIZE"] == "1"


def test_the_job_is_done_when_the_chief_is_and_the_others_are_shut_down(
    tmp_path: Path, alive: int, short_graces: None
) -> None:
    run(spec(tmp_path, pool(tmp_path, "sys.exit(0)"), pool(tmp_path, HOLD, 2)))
    assert os.read(alive, 1) == b""


def test_the_others_may_finish_on_their_own_after_the_chief(tmp_path: Path, alive: int) -> None:
    os.mkfifo(tmp_path / "chief")
    chief = 'open(here / "chief", "w")'
    worker = '(here / "chief").read_text(); (here / "finished").touch()'
    run(spec(tmp_path, pool(tmp_path, chief), pool(tmp_path, worker)))
    assert (tmp_path / "finished").exists()


def test_a_failing_worker_fails_the_job_and_ends_the_chief_with_sigterm(
    tmp_path: Path, alive: int, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "ready")
    chief = """
def on_term(*_):
    (here / "terminated").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, on_term)
open(here / "ready", "w").close()
signal.pause()
"""
    worker = '(here / "ready").read_text(); print("error: no such image", file=sys.stderr); sys.exit(65)'
    error = run_failing(spec(tmp_path, pool(tmp_path, chief), pool(tmp_path, worker)))
    assert error.code == ExitCode.DATA
    assert str(error) == "no such image\n  where:    replica workerpool1-0, exit code 65 (data)"
    assert (tmp_path / "terminated").exists() and os.read(alive, 1) == b""
    assert "[workerpool1-0] error: no such image" in capsys.readouterr().out
    assert record(tmp_path)["state"] == "failed" and record(tmp_path)["detail"]["exit_code"] == 65
    assert record(tmp_path)["message"] == "no such image" and record(tmp_path)["detail"]["error"] == str(error)


def test_a_telling_exit_code_beats_that_of_a_replica_that_lost_its_peer(tmp_path: Path, alive: int) -> None:
    os.mkfifo(tmp_path / "worker")
    worker = 'link = open(here / "worker", "w"); sys.exit(1)'
    chief = '(here / "worker").read_text(); sys.exit(73)'
    error = run_failing(spec(tmp_path, pool(tmp_path, chief), pool(tmp_path, worker)))
    assert error.code == ExitCode.CANNOT_WRITE


def test_a_killed_replica_beats_one_that_merely_lost_it_and_both_may_speak(tmp_path: Path, alive: int) -> None:
    os.mkfifo(tmp_path / "worker")
    worker = 'print("unexpected error: RuntimeError: connection closed", file=sys.stderr); sys.exit(1)'
    chief = '(here / "worker").read_text(); print("error: killed\\n  to do:    again", file=sys.stderr); sys.exit(137)'
    error = run_failing(
        spec(tmp_path, pool(tmp_path, chief), pool(tmp_path, f'link = open(here / "worker", "w"); {worker}'))
    )
    assert error.code == 137
    assert str(error).splitlines()[:2] == ["killed", "  to do:    again"]


def test_a_replica_that_ignores_sigterm_is_killed_with_all_it_started(
    tmp_path: Path, alive: int, short_graces: None
) -> None:
    os.mkfifo(tmp_path / "ready")
    child = "import signal, sys; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').close(); signal.pause()"
    chief = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", {child!r}, str(here / "ready")]
subprocess.Popen(command, pass_fds=[alive.fileno()], start_new_session=True)
signal.pause()
"""
    worker = '(here / "ready").read_text(); sys.exit(3)'
    error = run_failing(spec(tmp_path, pool(tmp_path, chief), pool(tmp_path, worker)))
    assert error.code == 3 and os.read(alive, 1) == b""


def test_temporary_files_of_a_killed_replica_are_removed(tmp_path: Path, alive: int) -> None:
    chief = 'import tempfile; (here / "left").write_text(tempfile.mkdtemp()); os.kill(os.getpid(), signal.SIGKILL)'
    assert run_failing(spec(tmp_path, pool(tmp_path, chief))).code == 128 + signal.SIGKILL
    assert not Path((tmp_path / "left").read_text()).exists()


def test_a_job_that_runs_longer_than_its_timeout_is_ended(tmp_path: Path, alive: int) -> None:
    error = run_failing(spec(tmp_path, pool(tmp_path, HOLD), scheduling={"timeout": "1s"}))
    assert "longer than its timeout of 1 s" in str(error) and os.read(alive, 1) == b""


def test_logs_are_kept_by_replica_and_only_the_chiefs_lines_are_shown(
    tmp_path: Path, alive: int, capsys: pytest.CaptureFixture[str]
) -> None:
    speak = 'print(f"I am {name}")'
    run(spec(tmp_path, pool(tmp_path, speak), pool(tmp_path, speak)))
    logs = {path.name: path.read_text() for path in (tmp_path / "run/logs/train").iterdir()}
    assert logs == {"workerpool0-0.log": "I am workerpool0-0\n", "workerpool1-0.log": "I am workerpool1-0\n"}
    shown = capsys.readouterr().out
    assert "[workerpool0-0] I am workerpool0-0" in shown and "I am workerpool1-0" not in shown


def test_the_record_that_the_jobs_own_program_wrote_stays(tmp_path: Path, alive: int) -> None:
    script = """
record = {"step": "train", "state": "failed", "message": "loss is not finite", "detail": {"steps": 3}}
(here / "run/steps/train.json").write_text(json.dumps(record))
sys.exit(1)
"""
    run_failing(spec(tmp_path, pool(tmp_path, script)))
    assert record(tmp_path)["message"] == "loss is not finite"
    assert record(tmp_path)["detail"]["steps"] == 3 and record(tmp_path)["detail"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"useSpot": True}, "worker_pool_specs[0].useSpot: found a field that WorkerPoolSpec does not have"),
        ({"machineSpec": {}}, "write machine_spec"),
        (
            {"machine_spec": {"machine_type": "a", "accelerator_type": "NVIDIA_TESLA_T5"}},
            "did you mean NVIDIA_TESLA_T4",
        ),
        ({"machine_spec": {"machine_type": "a", "accelerator_count": "4"}}, "expected: a whole number"),
        ({"replica_count": 2}, "exactly 1: pool 0 is the chief"),
        ({"replica_count": 1.5}, "expected: a whole number"),
    ],
)
def test_a_spec_that_vertex_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(spec(tmp_path, pool(tmp_path, "raise SystemExit") | change))
    assert words in str(caught.value) and caught.value.code == 64
    assert record(tmp_path)["detail"]["exit_code"] == 64 and not (tmp_path / "run/logs").exists()


def start_step(tmp_path: Path, *pools: dict[str, Any]) -> subprocess.Popen[str]:
    """The step as its own process, up to the moment when the chief says that it is ready."""
    body = "import json, sys; from vlmpipe.platforms import job_step as job\n"
    body += "job.run_custom_job('local', **json.loads(sys.argv[1]))"
    inputs = {
        "display_name": "t",
        "worker_pool_specs": pools,
        "base_output_directory": str(tmp_path / "run"),
        "labels": {"vlmpipe-step": "train"},
    }
    process = subprocess.Popen(
        [sys.executable, "-c", body, json.dumps(inputs)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    assert any("ready" in line for line in process.stdout), "the chief did not start"
    return process


READY_THEN_75 = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(here / "worker").read_text()
print("ready")
signal.pause()
"""
WORKER_IN_OWN_SESSION = """
command = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.Popen(command, pass_fds=[alive.fileno()], start_new_session=True)
open(here / "worker", "w").close()
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_request_to_stop_reaches_the_replicas_and_their_exit_code_comes_back(
    tmp_path: Path, alive: int, number: signal.Signals
) -> None:
    os.mkfifo(tmp_path / "worker")
    step = start_step(tmp_path, pool(tmp_path, READY_THEN_75), pool(tmp_path, WORKER_IN_OWN_SESSION))
    step.send_signal(number)
    assert step.wait() == ExitCode.PREEMPTED
    assert os.read(alive, 1) == b""
    assert record(tmp_path)["detail"]["exit_code"] == 75 and record(tmp_path)["state"] == "stopped"


def test_nothing_is_left_when_the_step_itself_is_killed(tmp_path: Path, alive: int) -> None:
    os.mkfifo(tmp_path / "worker")
    step = start_step(tmp_path, pool(tmp_path, READY_THEN_75), pool(tmp_path, WORKER_IN_OWN_SESSION))
    step.kill()
    step.wait()
    assert os.read(alive, 1) == b""


def test_a_stopped_launcher_ends_the_job_and_is_named(
    tmp_path: Path, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may be done: nothing else would ever end it."""
    monkeypatch.setattr("vlmpipe.platforms.local.jobs.supervisor.LOOK_S", 0.05)
    monkeypatch.setattr("vlmpipe.platforms.local.jobs.supervisor.STOPPED_S", 0.2)
    monkeypatch.setattr("vlmpipe.platforms.local.jobs.supervisor.FAILED_GRACE_S", 0.2)
    error = run_failing(spec(tmp_path, pool(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")))
    assert "the launcher of workerpool0-0 has been stopped for 0.2 s (SIGSTOP)" in str(error)
