"""Follows a run until it ends. Watching starts and stops nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from vlmpipe.runs.live_view import View
from vlmpipe.runs.run_state import RunState
from vlmpipe.trainer.errors import ExitCode, UserError

LOCAL_POLL_S, SERVICE_POLL_S = 0.5, 15.0


class Seen(Protocol):
    """A run at one moment."""

    @property
    def state(self) -> RunState: ...
    @property
    def is_over(self) -> bool: ...


Status = TypeVar("Status", bound=Seen)


def watch(
    run: str, read: Callable[[], Status], view: View, *, every_s: float, sleep: Callable[[float], None] | None = None
) -> Status:
    """Show the run's state until the run is over; returns the last state.

    Polls on while the service does not answer: a run of days outlives a network. Raises other errors of `read`, and
    UserError (exit 130) after Ctrl-C.
    """
    sleep = sleep or time.sleep
    silent = ""
    try:
        while True:
            try:
                status = read()
            except UserError as error:
                if error.code != ExitCode.UNAVAILABLE:
                    raise
                if silent != error.found:
                    silent = error.found
                    view.note(f"no answer, trying again every {every_s:g} s: {error.found}")
            else:
                silent = ""
                view.update(status.state)
                if status.is_over:
                    return status
            sleep(every_s)
    except KeyboardInterrupt:
        fix = f"vlmpipe status {run} --watch watches it again, vlmpipe cancel {run} stops it"
        raise UserError("stopped watching; the run continues", fix=fix, code=ExitCode.INTERRUPTED) from None
    finally:
        view.close()
