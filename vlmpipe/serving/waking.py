"""Questions to an endpoint that sleeps, which refuses them until a replica has started."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmpipe.serving.openai import Answer
from vlmpipe.trainer.errors import ExitCode, UserError

WAKING_S, WAKING_POLL_S = 1800.0, 15.0  # until a replica of a sleeping endpoint answers


def answer_once_awake(ask: Callable[[], Answer], *, sleeps: bool) -> Answer:
    """The answer; of an endpoint that sleeps once a replica has started. Raises UserError where it is not there."""
    until = time.monotonic() + (WAKING_S if sleeps else 0.0)
    while True:
        try:
            return ask()
        except UserError as error:
            if error.code != ExitCode.UNAVAILABLE or time.monotonic() >= until:
                raise
        time.sleep(WAKING_POLL_S)
