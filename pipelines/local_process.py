"""The process that carries a local run out: started, watched, stopped on request, swept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from types import FrameType

from pipelines.live_view import View
from pipelines.local_run import RUN_FILE_COPY, LocalRun
from pipelines.run_state import ATTEMPT_LINE
from trainer.errors import ExitCode, os_errors

POLL_S = 0.25
LAST_PROCESSES_S = 60.0  # for what the pipeline started to end after it; then it is killed


class PipelineProcess:
    """The pipeline as a process group of its own, with its output in the run's log.

    Ctrl-C in a terminal reaches the foreground group only, so that this program decides what the pipeline is told. The
    pipeline inherits the run's lock: should this program be killed, the run still counts as going on while it does.
    """

    def __init__(self, command: Sequence[str], run: LocalRun) -> None:
        with os_errors(f"writing {run.log}"), run.log.open("ab") as log:
            log.write(f"{ATTEMPT_LINE} {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            log.flush()  # before the pipeline's own lines
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(run.lock,),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.num_requests = 0

    def exit_code(self) -> int | None:
        """The pipeline's exit code once it has ended; 128 + n when signal n ended it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def request_stop(self) -> None:
        """Ask the pipeline to stop; the second time at once; the third time kill it."""
        self.num_requests += 1
        self._signal(signal.SIGINT if self.num_requests <= 2 else signal.SIGKILL)

    def sweep(self) -> None:
        """Wait for what the pipeline started, then kill what is left of its group."""
        deadline_s = time.monotonic() + LAST_PROCESSES_S
        while self._signal(0) and time.monotonic() < deadline_s and self.num_requests < 3:
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group. Whether there is any process in it."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def pipeline_command(run: LocalRun) -> list[str]:
    """The command line of the pipeline on this machine."""
    config = str(run.folder / RUN_FILE_COPY)
    return [sys.executable, "-m", "pipelines.targets.local", "--config", config, "--run-id", run.marker.run_id]


def execute(run: LocalRun, view: View, command: Sequence[str] | None = None) -> int:
    """Carry the run out and show it. Returns its exit code: the failing step's, or 130 when it was asked to stop."""
    process = PipelineProcess(command or pipeline_command(run), run)

    def stop(_number: int, _frame: FrameType | None) -> None:
        process.request_stop()
        first = "Stopping: waiting for the checkpoint. Ctrl-C again stops at once."
        view.note(first if process.num_requests == 1 else "Stopping at once.")

    with _on_signals(stop):
        try:
            while (code := process.exit_code()) is None:
                view.update(run.state())
                process.wait(POLL_S)
        except BaseException:
            process.request_stop()
            raise
        finally:
            process.sweep()
            stopped = process.num_requests > 0 and process.exit_code() != 0
            state = run.state().ended(by_request=stopped)
            view.update(state)
            view.close()
    if stopped:
        code = ExitCode.INTERRUPTED
    elif code and state.failed:
        code = int(state.failed.detail.get("exit_code", code))
    run.close(code)
    return code


@contextlib.contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup asks to go on without a terminal
    ]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
