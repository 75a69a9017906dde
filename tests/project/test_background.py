"""The suite, started where signals are ignored: in the background of a script, under nohup, in some CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.support.paths import ROOT

# Of one that is sent to the suite's own process, to a child, and through a launcher to its child.
SENDING = (
    "tests/unit/vlmpipe/runs/folders/test_run.py::test_ctrl_c_waits_for_the_checkpoint_and_the_same_command_continues",
    "tests/unit/vlmpipe/platforms/test_step_context.py",
    "tests/unit/trainer/test_launch.py::test_signal_is_forwarded_to_the_only_process",
)
LIMIT_S = 120


def test_tests_that_send_signals_pass_where_signals_are_ignored() -> None:
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SENDING]
    command = ["sh", "-c", "trap '' INT TERM HUP; exec \"$@\"", "sh", *suite]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("line", "sends"),
    [
        ("process.send_signal(signal.SIGINT)", True),
        ("os.kill(pid, signal.SIGTERM)", True),
        ("terminal.press_ctrl_c()", True),
        ("program.terminate()", True),
        ("number = signal.SIGTERM", False),
    ],
)
def test_files_that_send_signals_are_found_by_their_words(line: str, sends: bool) -> None:
    assert bool(conftest.SENDS_SIGNALS.search(line)) == sends


def test_a_test_that_sends_signals_has_a_short_limit(request: pytest.FixtureRequest) -> None:
    """This file has the words too."""
    limit = request.node.get_closest_marker("timeout")
    assert limit is not None and limit.args[0] <= conftest.PATIENCE * conftest.SIGNAL_LIMIT_S
    assert conftest.SENDS_SIGNALS.search(Path(__file__).read_text(encoding="utf-8"))
