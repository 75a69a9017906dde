"""Points in the checkpoint protocol at which tests kill the process."""

from __future__ import annotations

import os
import signal

VARIABLE = "VLMPIPE_CRASH_AT"
POINTS = (
    "snapshot taken", "files written", "first file uploaded", "files uploaded", "manifest written", "before COMMIT",
    "after COMMIT", "after LATEST", "COMMIT of an old one deleted", "some files of an old one deleted",
    "leftovers half swept",
)  # fmt: skip


def crash_point(name: str) -> None:
    """Die by SIGKILL if VLMPIPE_CRASH_AT is `name`, one of POINTS."""
    assert name in POINTS, name
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
