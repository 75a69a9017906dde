"""The process of a local run: start, watch, stop on request."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from types import FrameType

from vlmpipe.platforms.jobs.inherited_environment import inherited_environment
from vlmpipe.platforms.jobs.signals import handling, in_main_thread
from vlmpipe.platforms.local.jobs.subreaper import run_in_subreaper
from vlmpipe.runs.folders.run import LocalRun
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.runs.folders.state import ATTEMPT_LINE
from vlmpipe.runs.live_view import View
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import SteadyClocks
from vlmpipe.trainer.errors import CAUSES, ExitCode, UserError, os_errors, print_warning
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

GRACE_S = 60.0  # from SIGTERM to SIGKILL: longer than a job's own, so that its checkpoint and the report are written
POLL_S = 1.0  # clocks on the screen count seconds
DIAGNOSIS = "diagnosis.json"  # which the report shows
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PipelineProcess:
    """The pipeline in a subreaper and a process group of its own, with its output in the run's log.

    Ctrl-C in a terminal reaches the foreground group only, so this program decides which signal the pipeline gets. If
    this program is killed, the pipeline is asked to stop. The subreaper inherits the run's lock: the run counts as
    running until no process of the pipeline is left.
    """

    def __init__(self, command: Sequence[str], run: LocalRun) -> None:
        with os_errors(f"writing {run.log}"), run.log.open("ab") as log:
            log.write(f"{ATTEMPT_LINE} {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            log.flush()  # before the pipeline's own lines
            self._process = subprocess.Popen(
                run_in_subreaper(command, grace_s=GRACE_S),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(run.lock,),
                # No file of the working directory, such as random.py, shadows a module: python -P, for all processes.
                env=inherited_environment() | {"PYTHONSAFEPATH": "1"},
            )
        self.num_requests = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The pipeline's exit code once all its processes have ended; 128 + n when signal n ended it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def request_stop(self) -> None:
        """Ask the pipeline to stop; the second request kills it."""
        self.num_requests += 1
        self._process.terminate()


def pipeline_command(run: LocalRun, *, retries: int | None = None, faults: Sequence[str] = ()) -> list[str]:
    """The command line of the pipeline on this machine. `retries` and `faults` are what `vlmpipe run` takes."""
    config = str(run.folder / RUN_FILE_COPY)
    command = [
        sys.executable,
        "-m",
        "vlmpipe.pipelines.local_runner",
        "--config",
        config,
        "--run-id",
        run.marker.run_id,
    ]
    if retries is not None:
        command += ["--retries", str(retries)]
    return [*command, "--inject-fault", ";".join(faults)] if faults else command


def execute(run: LocalRun, view: View, command: Sequence[str] | None = None) -> int:
    """Execute the run and show it. Returns its exit code: the failing step's, or 130 when it was asked to stop.

    An error while stopping, such as a full disk under the last checkpoint, is a failure. In another thread than the
    main one, no signal of this process stops it: `vlmpipe cancel` does, and the end of this process.
    """
    (run.folder / DIAGNOSIS).unlink(missing_ok=True)  # of an attempt before this one
    process: PipelineProcess | None = None
    steady = SteadyClocks()

    def state() -> RunState:
        state = run.state()
        return replace(state, steps=steady(state.steps))

    early = 0  # requests to stop before it has started

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal early
        if process is None:
            early += 1
            return
        if number == signal.SIGHUP and process.num_requests:
            return  # a closing terminal may send several
        process.request_stop()
        first = "Stopping: progress is being saved. Ctrl-C again stops at once."
        view.note(first if process.num_requests == 1 else "Stopping at once.")

    # Under nohup the run continues without a terminal.
    numbers = [signal_number for signal_number in STOP_SIGNALS if signal.getsignal(signal_number) is not signal.SIG_IGN]
    with handling(numbers, stop):
        process = PipelineProcess(command or pipeline_command(run), run)
        try:
            if not in_main_thread():
                run.name_stopper(process.pid)
            if early:
                stop(signal.SIGINT, None)
            while (code := process.exit_code()) is None:
                view.update(state())
                process.wait(POLL_S)
            if code:
                failed = state().failed
                code = failed.exit_code if failed else code
                if process.num_requests and code not in CAUSES:
                    code = ExitCode.INTERRUPTED
            view.update(state().ended(code))
        except BaseException:  # for example a view whose terminal is gone: the run is stopped, not abandoned
            if not process.num_requests:
                process.request_stop()
            process.wait()
            raise
        finally:
            view.close()
    run.close(code)
    if code:
        _report_cause(run)
    return code


def _report_cause(run: LocalRun) -> None:
    """Write the diagnosis beside the run's records and into its report. What prevents it is printed, and no failure."""
    if not (run.folder / "run.json").is_file():
        return
    from vlmpipe.report.build import write_report
    from vlmpipe.runs.folders.diagnose import diagnose_folder

    try:
        write_record(LocalStorage(run.folder), DIAGNOSIS, diagnose_folder(run.folder).as_json(), indent=1)
        write_report(str(run.folder))
    except UserError as error:
        print_warning(f"the report has no diagnosis: {error.found}", step="report")
