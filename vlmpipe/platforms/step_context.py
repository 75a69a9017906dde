"""Context of every step's body: writes the step's record, and turns errors into a message and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator

from vlmpipe.platforms.jobs.signals import handling
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors, print_error
from vlmpipe.trainer.progress import Progress, step_progress
from vlmpipe.trainer.redaction import hide_secrets, redact

# Set by a local run for its steps:
STOPPED_VARIABLE = "VLMPIPE_STOPPED"  # steps must not begin, because the run was asked to stop
FAILURE_VARIABLE = "VLMPIPE_FAILURE_FILE"  # file for the error: on a full disk the record cannot be written
RETRIES_VARIABLE = "VLMPIPE_LOCAL_RETRIES"  # restarts of each replica of a job
FAULTS_VARIABLE = "VLMPIPE_FAULTS"  # faults to inject into the training job


@contextlib.contextmanager
def step_context(run_uri: str, name: str, *, even_when_stopped: bool = False) -> Iterator[Progress]:
    """The body of step `name`: writes `steps/<name>.json` and ends the process as `exit_on_error` does.

    The record holds the error and its exit code, because kfp only reports that a step failed.
    """
    with (
        exit_on_error(even_when_stopped=even_when_stopped),
        stop_as_error(name),
        step_progress(run_uri, name) as progress,
        os_errors(f"running {name}"),
    ):
        yield progress


@contextlib.contextmanager
def stop_as_error(name: str) -> Iterator[None]:
    """SIGTERM as an error inside the block, so that the step closes its record and removes its temporary files."""

    def stop(_number: int, _frame: object) -> None:
        raise UserError(f"{name} was stopped on request", fix="run again to continue", code=ExitCode.PREEMPTED)

    with handling([signal.SIGTERM], stop):
        yield


@contextlib.contextmanager
def exit_on_error(*, even_when_stopped: bool = False) -> Iterator[None]:
    """Turn a UserError into a message on stderr and a SystemExit with its code.

    Unexpected errors end the process with 1 and a traceback; neither shows a secret of a known form. After a request to
    stop, the block is not run.
    """
    hide_secrets()  # to the process's end: kfp's program prints the traceback
    if os.environ.get(STOPPED_VARIABLE) and not even_when_stopped:
        print("not started, because the run was asked to stop", flush=True)
        raise SystemExit(int(ExitCode.PREEMPTED))
    try:
        yield
    except UserError as error:
        print_error(error)
        _leave_failure(error)
        raise SystemExit(int(error.code)) from None


def _leave_failure(error: UserError) -> None:
    """The first step that fails is the cause: the ones after it, such as notify, find the file there."""
    if path := os.environ.get(FAILURE_VARIABLE):
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            json.dump({"exit_code": int(error.code), "error": redact(error.text())}, file)
