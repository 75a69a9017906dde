"""The watch's wait, which a request to stop ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from vlmpipe.platforms.kubeflow.jobs.watch import Stopped, stoppable


def test_a_wait_ends_on_its_own() -> None:
    with stoppable() as wait:
        wait(0.0)
        wait(0.01)


@pytest.mark.timeout(20)
def test_a_signal_between_any_two_lines_of_the_wait_ends_it() -> None:
    """A handler runs between any two lines of the main thread, also where that thread holds a lock."""
    lines = 0
    while _stopped_at(lines):
        lines += 1
    assert lines >= 2  # before the wait and in it


def _stopped_at(number: int) -> bool:
    """Wait, with SIGTERM before the line of that number. Whether there is such a line."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == number + 1:
                signal.raise_signal(signal.SIGTERM)
        return trace

    with stoppable() as wait:
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            wait(0.02)
            sys.settrace(before)
            wait(0.0)  # for a signal that came after all was over
        except Stopped:
            return True
        finally:
            sys.settrace(before)
    return False
