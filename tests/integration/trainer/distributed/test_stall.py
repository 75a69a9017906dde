"""A rank that stops in the middle of training: the others notice, leave their stacks, and the run says what it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.support.trainer.preloaded import REPOSITORY
from tests.support.trainer.runs import make_run
from vlmpipe.platforms.local.jobs.fault_injector import worker_of_rank
from vlmpipe.runs.folders.diagnose import diagnose_folder
from vlmpipe.trainer.errors import ExitCode

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")]

PATIENCE_S = 60.0
STEPS_BEFORE = 5
Found = TypeVar("Found")


def wait_for(look: Callable[[], Found | None], what: str) -> Found:
    """What `look` finds, as soon as it finds anything."""
    ticks = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if (found := look()) is not None:
            return found
        ticks.wait(0.05)
    raise AssertionError(f"{what} did not come about")


def is_running(process: psutil.Process) -> bool:
    """Whether it still runs: an ended child that torchrun has not asked for yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_asked_to_end(pid: int) -> bool:
    """Whether a SIGTERM waits for a process that is stopped."""
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_stopped_rank_ends_the_job_with_71_and_is_found(tmp_path: Path) -> None:
    changes = {"train.epochs": 2000, "train.stall_floor_s": 2.0, "train.stall_factor": 5.0}
    job = make_run(tmp_path, "stall", changes, features="off")
    run = Path(job.run.run_uri)
    log = run / "logs/train/workerpool0-0.log"
    log.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "2", "--", "vlmpipe.trainer.train"]
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [*command, "--config", f"{run}/run.json"],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    stopped = None
    try:
        metrics, stacks = run / "metrics.jsonl", run / "logs/stacks/rank-1.txt"
        wait_for(
            lambda: True if metrics.exists() and len(metrics.read_text().splitlines()) > STEPS_BEFORE else None,
            f"step {STEPS_BEFORE}",
        )
        stopped = wait_for(lambda: worker_of_rank(launcher.pid, 0), "rank 0")
        other = wait_for(lambda: worker_of_rank(launcher.pid, 1), "rank 1")
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: True if stacks.exists() else None, "the stacks of rank 1")
        wait_for(lambda: None if is_running(other) else True, "the end of rank 1")
        # The stopped rank does not hear that it is to end: torchrun kills it after 30 s, which are not waited for. One
        # that went on instead might make a step, and report a stall of its own.
        wait_for(lambda: True if is_asked_to_end(stopped.pid) else None, "torchrun's SIGTERM to rank 0")
        stopped.kill()
        assert launcher.wait(PATIENCE_S) == ExitCode.STALLED
    finally:
        if stopped is not None and launcher.poll() is None:
            stopped.send_signal(signal.SIGCONT)
        launcher.terminate()
        launcher.wait()

    found = diagnose_folder(run)
    assert found.pattern and found.pattern.id == "stalled"
    assert found.stall and found.stall.silent == (0,) and list(found.stall.ranks) == [1]
    assert any(frame.function == "train" for frame in found.stall.ranks[1]), "it waits for the other in a step"
    assert [end.how for end in found.ends if end.rank == 1] == ["code 71"]
    preflight = json.loads((run / "preflight.json").read_text())
    assert preflight["world_size"] == 2 and preflight["all_reduce"]["bus_gb_per_s"] > 0
    assert [node["node"] for node in preflight["nodes"]] == [0]
