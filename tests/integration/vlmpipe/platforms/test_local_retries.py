"""What a local job starts again, and what not: small scripts stand for the replicas, as in test_local_job.py.

Each counts its starts in a file, so that a test reads who was started how often, and with which environment.
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

from tests.fakes.replicas import pool, record, run, run_failing, spec
from vlmpipe.platforms.local.jobs import restart_policy as restart_budget
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.platforms.local.jobs.restart_policy import RestartPolicy
from vlmpipe.platforms.step_context import FAULTS_VARIABLE, RETRIES_VARIABLE
from vlmpipe.trainer.errors import ExitCode

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("alive", "short_graces")]

START = """
import time
with open(here / f"{name}.starts", "a") as file:
    file.write(os.environ["CLUSTER_SPEC"] + chr(10))
start = len((here / f"{name}.starts").read_text().splitlines())

def progress(done):
    folder = here / "run/steps"
    (folder / f"new-{name}").write_text(json.dumps({"step": "train", "started_s": time.time(), "done": done}))
    os.replace(folder / f"new-{name}", folder / "train.json")
"""
TOGETHER = {"restart_job_on_worker_restart": True}


def starting(tmp_path: Path, script: str, replica_count: int = 1) -> dict[str, Any]:
    return pool(tmp_path, START + script, replica_count)


def starts(tmp_path: Path) -> dict[str, int]:
    """How often each replica was started."""
    return {path.stem: len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*.starts"))}


def restarts(tmp_path: Path) -> list[str]:
    found: list[str] = record(tmp_path)["detail"].get("restarts", [])
    return found


def chaos_log(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run/faults.jsonl").read_text().splitlines()]


@pytest.fixture
def small_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chaos implies this budget: one of each. The one event is never due."""
    monkeypatch.setattr(restart_budget, "PLATFORM", RestartPolicy(1, 1, 1))
    monkeypatch.setenv(FAULTS_VARIABLE, "kill:node=0,after_step=999")


WAITS = '(here / "done").read_text()'  # a FIFO: until the worker says that it is done
FAILS_TWICE = """
if start < 3:
    sys.exit(9)
(here / "done").write_text("yes")
"""


def test_a_worker_is_restarted_alone_with_the_same_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "2")
    os.mkfifo(tmp_path / "done")
    run(spec(tmp_path, starting(tmp_path, WAITS), starting(tmp_path, FAILS_TWICE)))
    assert starts(tmp_path) == {"workerpool0-0": 1, "workerpool1-0": 3}
    assert len(set((tmp_path / "workerpool1-0.starts").read_text().splitlines())) == 1
    assert restarts(tmp_path) == [
        f"workerpool1-0 ended with exit code 9, and it was started again (restart {number} of 2)" for number in (1, 2)
    ]
    assert record(tmp_path)["state"] == "done"


def test_restart_job_on_worker_restart_restarts_all_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "2")
    os.mkfifo(tmp_path / "done")
    run(spec(tmp_path, starting(tmp_path, WAITS), starting(tmp_path, FAILS_TWICE), scheduling=TOGETHER))
    assert starts(tmp_path) == {"workerpool0-0": 3, "workerpool1-0": 3}


def test_the_log_of_a_replica_holds_all_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "1")
    run(spec(tmp_path, starting(tmp_path, 'print(f"start {start}"); sys.exit(9 if start == 1 else 0)')))
    assert (tmp_path / "run/logs/train/workerpool0-0.log").read_text() == "start 1\nstart 2\n"


def test_by_default_the_first_failure_ends_the_job(tmp_path: Path) -> None:
    error = run_failing(spec(tmp_path, starting(tmp_path, "sys.exit(9)"), scheduling=TOGETHER))
    assert error.code == 9 and starts(tmp_path) == {"workerpool0-0": 1} and restarts(tmp_path) == []


def test_used_up_restarts_end_the_job_with_the_replicas_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "1")
    script = 'print(f"error: try {start} failed", file=sys.stderr); sys.exit(9)'
    error = run_failing(spec(tmp_path, starting(tmp_path, script)))
    assert str(error) == "try 2 failed\n  where:    replica workerpool0-0, exit code 9, after 1 restart"
    assert starts(tmp_path) == {"workerpool0-0": 2} and len(restarts(tmp_path)) == 1


@pytest.mark.usefixtures("small_platform")
def test_used_up_restarts_lead_to_retries_of_the_whole_job(tmp_path: Path) -> None:
    pools = starting(tmp_path, "signal.pause()"), starting(tmp_path, "sys.exit(9)")
    assert run_failing(spec(tmp_path, *pools)).code == 9
    assert starts(tmp_path) == {"workerpool0-0": 2, "workerpool1-0": 4}
    assert [line["budget"] for line in chaos_log(tmp_path) if line["event"] == "restart"] == [
        "restart 1 of 1", "retry 1 of 1 of the job", "restart 1 of 1"
    ]  # fmt: skip


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.DATA, ExitCode.CHECKPOINT_CORRUPT, ExitCode.NO_PROGRESS])
@pytest.mark.usefixtures("small_platform")
def test_a_named_cause_ends_the_job_at_once(tmp_path: Path, code: ExitCode) -> None:
    error = run_failing(spec(tmp_path, starting(tmp_path, f"sys.exit({int(code)})"), scheduling=TOGETHER))
    assert error.code == code and starts(tmp_path) == {"workerpool0-0": 1}


@pytest.mark.usefixtures("small_platform")
def test_a_cause_named_while_all_are_ended_for_a_restart_ends_the_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "done")
    chief = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(73))
(here / "done").write_text("yes")
signal.pause()
"""
    worker = '(here / "done").read_text(); sys.exit(9)'
    error = run_failing(spec(tmp_path, starting(tmp_path, chief), starting(tmp_path, worker), scheduling=TOGETHER))
    assert error.code == ExitCode.CANNOT_WRITE and starts(tmp_path) == {"workerpool0-0": 1, "workerpool1-0": 1}


@pytest.mark.usefixtures("small_platform")
def test_disable_retries_leaves_restarts_in_place_only(tmp_path: Path) -> None:
    scheduling = {"disable_retries": True, "restart_job_on_worker_restart": True}
    pools = starting(tmp_path, "signal.pause()"), starting(tmp_path, "sys.exit(9)")
    assert run_failing(spec(tmp_path, *pools, scheduling=scheduling)).code == 9
    assert starts(tmp_path) == {"workerpool0-0": 1, "workerpool1-0": 2}


@pytest.mark.usefixtures("small_platform")
def test_a_job_whose_chief_is_done_is_done_although_a_worker_has_just_failed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "done")
    worker = 'link = open(here / "done", "w"); sys.exit(9)'  # the chief sees its end
    run(spec(tmp_path, starting(tmp_path, WAITS), starting(tmp_path, worker), scheduling=TOGETHER))
    assert starts(tmp_path) == {"workerpool0-0": 1, "workerpool1-0": 1}


def test_the_timeout_counts_all_starts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "1000")
    scheduling = {"timeout": "2s", **TOGETHER}
    error = run_failing(spec(tmp_path, starting(tmp_path, "sys.exit(9)"), scheduling=scheduling))
    assert "longer than its timeout of 2 s" in str(error) and starts(tmp_path)["workerpool0-0"] > 1


def test_a_job_that_is_asked_to_stop_is_not_started_again(tmp_path: Path) -> None:
    script = """
if start == 1:
    sys.exit(9)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
signal.pause()
"""
    body = "import json, sys; from vlmpipe.platforms import job_step as job\n"
    body += "job.run_custom_job('local', **json.loads(sys.argv[1]))"
    inputs = {
        "display_name": "t",
        "worker_pool_specs": [starting(tmp_path, script)],
        "base_output_directory": str(tmp_path / "run"),
        "labels": {"vlmpipe-step": "train"},
    }
    step = subprocess.Popen(
        [sys.executable, "-c", body, json.dumps(inputs)],
        env={**os.environ, RETRIES_VARIABLE: "5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert step.stdout and any("ready" in line for line in step.stdout)
    step.send_signal(signal.SIGTERM)
    assert step.wait() == ExitCode.PREEMPTED
    step.stdout.close()
    assert starts(tmp_path) == {"workerpool0-0": 2} and record(tmp_path)["state"] == "stopped"


# Ordered faults

SAVES_ON_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: ((here / f"{name}.saved").touch(), sys.exit(75)))
"""
DONE_WHEN_BACK = """
if start == 2:
    sys.exit(0)
(here / "ready").read_text()
progress(7)
signal.pause()
"""
IS_READY = """
if start == 1:
    (here / "ready").write_text("yes")
"""


def test_a_reclaimed_replica_gets_its_notice_and_the_whole_job_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "preempt:node=1,after_step=5,notice=30s")
    os.mkfifo(tmp_path / "ready")
    ready = '(here / "ready")'  # the chief also waits for the worker that is started again
    chief = f"{SAVES_ON_SIGTERM}{ready}.read_text()\nif start == 2: sys.exit(0)\nprogress(7)\nsignal.pause()"
    worker = f'{SAVES_ON_SIGTERM}{ready}.write_text("yes")\nsignal.pause()'
    run(spec(tmp_path, starting(tmp_path, chief), starting(tmp_path, worker)))
    assert starts(tmp_path) == {"workerpool0-0": 2, "workerpool1-0": 2}
    assert {path.stem for path in tmp_path.glob("*.saved")} >= {"workerpool0-0", "workerpool1-0"}
    preempted, restarted = chaos_log(tmp_path)
    assert preempted["event"] == "preempt" and preempted["replica"] == "workerpool1-0" and preempted["said_steps"] == 7
    assert restarted["reclaimed"] and restarted["replica"] == "workerpool1-0" and restarted["exit_code"] == 75
    assert restarted["budget"] == "restart 1 of 6 after reclaims"


def test_a_reclaimed_replica_that_does_not_leave_is_killed_when_its_notice_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "preempt:node=1,after_step=5,notice=0.3s")
    os.mkfifo(tmp_path / "ready")
    deaf = f"signal.signal(signal.SIGTERM, signal.SIG_IGN){IS_READY}signal.pause()"
    run(spec(tmp_path, starting(tmp_path, DONE_WHEN_BACK), starting(tmp_path, deaf)))
    assert chaos_log(tmp_path)[1]["exit_code"] == 128 + signal.SIGKILL


def test_a_rank_is_killed_and_its_launcher_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher stands between the container and its ranks, and has a RANK of its own, which counts nodes."""
    monkeypatch.setenv(FAULTS_VARIABLE, "kill:rank=1,after_step=5")
    os.mkfifo(tmp_path / "ready")
    worker = """
if start == 2:
    sys.exit(0)
command = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(command, env={**os.environ, "RANK": "1", "LOCAL_RANK": "0"}, start_new_session=True)
(here / "ready").write_text("yes")
assert child.wait() == -signal.SIGKILL
sys.exit(42)
"""
    run(spec(tmp_path, starting(tmp_path, DONE_WHEN_BACK), starting(tmp_path, worker), scheduling=TOGETHER))
    assert [line["event"] for line in chaos_log(tmp_path)] == ["kill", "restart"]
    assert chaos_log(tmp_path)[1]["exit_code"] == 42 and chaos_log(tmp_path)[1]["budget"] == "restart 1 of 5"


def test_a_whole_node_is_killed_with_all_it_started(
    tmp_path: Path, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "kill:node=1,after_step=5")
    os.mkfifo(tmp_path / "ready")
    child = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
    start_child = f"subprocess.Popen({child}, pass_fds=[alive.fileno()], start_new_session=True)"
    worker = f"{start_child}{IS_READY}signal.pause()"
    run(spec(tmp_path, starting(tmp_path, DONE_WHEN_BACK), starting(tmp_path, worker), scheduling=TOGETHER))
    assert chaos_log(tmp_path)[1]["exit_code"] == 128 + signal.SIGKILL
    assert os.read(alive, 1) == b""


def test_a_stopped_node_continues_after_the_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker looks at the clock all the time, and is done when it has missed most of a second."""
    monkeypatch.setenv(FAULTS_VARIABLE, "stop:node=1,after_step=5,for=1s")
    os.mkfifo(tmp_path / "ready")
    os.mkfifo(tmp_path / "done")
    chief = f'(here / "ready").read_text(); progress(5); {WAITS}'
    worker = """
(here / "ready").write_text("yes")
last = time.monotonic()
while (now := time.monotonic()) - last < 0.9:
    last = now
(here / "done").write_text("yes")
"""
    run(spec(tmp_path, starting(tmp_path, chief), starting(tmp_path, worker)))
    assert starts(tmp_path) == {"workerpool0-0": 1, "workerpool1-0": 1}
    assert [line["event"] for line in chaos_log(tmp_path)] == ["stop"]


def test_an_event_counts_the_steps_since_the_last_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the first start's record still counted, the second kill would come before anything was trained again."""
    monkeypatch.setenv(FAULTS_VARIABLE, "kill:node=0,after_step=5;kill:node=0,after_step=5;kill:node=0,after_step=8")
    script = """
if start == 3:
    sys.exit(0)
if start == 2:
    (here / "begun").touch()
progress(6)
signal.pause()
"""
    run(spec(tmp_path, starting(tmp_path, script)))
    assert (tmp_path / "begun").exists() and starts(tmp_path) == {"workerpool0-0": 3}
    assert [line["event"] for line in chaos_log(tmp_path)] == ["kill", "restart", "kill", "restart", "missed"]


def test_faults_are_injected_into_training_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "kill:node=0,after_step=0")
    run_job("x", spec(tmp_path, starting(tmp_path, "")), labels={"vlmpipe-step": "evaluate"})
    assert not (tmp_path / "run/faults.jsonl").exists()


def test_no_fault_is_injected_after_a_stop_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reclaimed node may finish what it saves: its notice is not enforced any more."""
    monkeypatch.setenv(FAULTS_VARIABLE, "preempt:node=0,after_step=5,notice=0.3s")
    script = """
def save(*_):
    os.kill(int(sys.argv[2]), signal.SIGTERM)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    (here / "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
progress(5)
signal.pause()
"""
    job = starting(tmp_path, script)
    job["container_spec"]["args"] += [str(os.getpid())]
    assert run_failing(spec(tmp_path, job)).code == ExitCode.PREEMPTED
    assert (tmp_path / "saved").exists() and starts(tmp_path) == {"workerpool0-0": 1}
    assert [line["event"] for line in chaos_log(tmp_path)] == ["preempt"]
