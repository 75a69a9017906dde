"""A launcher that is stopped goes on after a while, and its guard ends with it however it ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from vlmpipe.trainer.distributed.launcher_guard import PROCESSES, is_stopped

pytestmark = pytest.mark.skipif(not (PROCESSES / "self/stat").exists(), reason="no /proc here")

LAUNCHER = """
import os, signal, sys
from vlmpipe.trainer.distributed.launcher_guard import guarded
with guarded(stopped_s=0.1, look_s=0.05):
    print(*[child.pid for child in __import__("psutil").Process().children()], flush=True)
    {body}
print("done", flush=True)
"""


def has_ended(pid: int) -> bool:
    """Whether it ends within a minute; its new parent may not have looked yet."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([end], [], [], 60)[0])
    finally:
        os.close(end)


def launcher(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCHER.format(body=body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_stopped_launcher_is_continued_and_said() -> None:
    out, err = launcher("os.kill(os.getpid(), signal.SIGSTOP)").communicate(timeout=60)
    assert out.endswith("done\n") and "the launcher was stopped (SIGSTOP) for 0.1 s: it is continued" in err


@pytest.mark.parametrize("body", ["pass", "raise SystemExit(3)", "os._exit(4)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_guard_ends_with_its_launcher(body: str) -> None:
    out, err = launcher(body).communicate(timeout=60)  # the pipes end with the last process that has them
    assert "stopped" not in err and has_ended(int(out.split()[0]))


def test_a_process_that_runs_or_is_gone_is_not_stopped() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert not is_stopped(process.pid)
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)


def test_a_stopped_guard_does_not_keep_its_launcher() -> None:
    stops = "guard = __import__('psutil').Process().children()[0]; guard.suspend()"
    out, _ = launcher(f"{stops}; sys.modules[guarded.__module__].END_S = 0.1").communicate(timeout=60)
    assert out.endswith("done\n") and has_ended(int(out.split()[0]))
