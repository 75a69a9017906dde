"""Children of a process that has imported everything: they end as workers do, and take nothing with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import os, signal, sys, threading, time
from vlmpipe.trainer.errors import ConfigError, ExitCode
from vlmpipe.trainer.trials.forked import ForkedChildren

children, seen = ForkedChildren(), []

def refuse():
    raise ConfigError("no such channel")

def fail():
    raise ValueError("broken")

def preempted():
    return ExitCode.PREEMPTED

print(children.run(lambda: seen.append(1)), seen)
print(children.run(refuse))
print(children.run(fail))
print(children.run(preempted))
print(children.run(lambda: os.kill(os.getpid(), signal.SIGKILL)))
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
print(children.run(lambda: time.sleep(60)), children.stopped)
"""


@pytest.mark.timeout(120)
def test_ends_of_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Ended(code=0, error='') []",  # what a child changes is its own
        "Ended(code=64, error='no such channel')",
        "Ended(code=1, error='unexpected error: ValueError: broken')",
        "Ended(code=75, error='ended with exit code 75')",
        "Ended(code=137, error='ended by SIGKILL')",
        "Ended(code=143, error='ended by SIGTERM') True",
    ]
