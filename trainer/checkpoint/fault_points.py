"""Places in the checkpoint protocol at which a test can kill the process."""

from __future__ import annotations

import os
import signal

VARIABLE = "VLMPIPE_CRASH_AT"
POINTS = (
    "snapshot taken",
    "files written",
    "first file uploaded",
    "files uploaded",
    "manifest written",
    "before COMMIT",
    "after COMMIT",
    "after LATEST",
    "COMMIT of an old one deleted",
    "some files of an old one deleted",
    "leftovers half swept",
)


def crash_point(name: str) -> None:
    """Die by SIGKILL here if the environment says so. `name` is one of POINTS."""
    assert name in POINTS, name
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
