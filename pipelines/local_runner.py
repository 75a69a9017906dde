"""Run a run file's pipeline on this machine, through kfp.local.

    python -m vlmpipe.pipelines.local_runner --config runs/runs/digits-1/run_file.json --run-id digits-1

`vlmpipe run` starts this program in a subreaper (vlmpipe/platforms/local/jobs/subreaper.py): when it ends, or when its
parent is killed, no process of it is left. SIGTERM asks it to stop.
"""

from __future__ import annotations

import argparse
import builtins
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.platforms.step_context import FAILURE_VARIABLE, FAULTS_VARIABLE, RETRIES_VARIABLE, STOPPED_VARIABLE
from vlmpipe.records.stage_folders import stage_run_id
from vlmpipe.trainer.config.job import run_uri_of
from vlmpipe.trainer.errors import ExitCode, run_main
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.records.step import read_steps
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record_file

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig


KILLED = {
    "exit_code": int(ExitCode.UNEXPECTED),
    "error": "ended without saying why: it may have been killed for lack of memory",
}


def run_local(config: RunConfig, *, run_id: str) -> int:
    """Run the pipeline in this process and return its exit code: 0, or that of the step that failed.

    Must be called from the main thread of a process group of its own: a request to stop goes to the whole group, in
    which kfp.local starts the steps.
    """
    with collector_off():
        from kfp import local

        from vlmpipe.pipelines.training import build

    root_uri = open_storage(config.output.root_uri).root_uri
    config = config.model_copy(update={"output": config.output.model_copy(update={"root_uri": root_uri})})
    run_uri = run_uri_of(root_uri, run_id, "")
    stages = list(config.stage_runs())
    folders = [run_uri_of(root_uri, stage_run_id(run_id, stage, stages), "") for stage in stages]
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=join_uri(run_uri, "kfp"))
    with collector_off():
        pipeline = build(config, "local")
    started_s = time.time()
    _pass_on_stop_requests()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-") as scratch:
        os.environ["TMPDIR"] = scratch  # kfp leaves each step's program there
        failure = Path(scratch, "failure.json")
        os.environ[FAILURE_VARIABLE] = str(failure)
        try:
            with print_put_back():
                pipeline(run_id=run_id)
        except RuntimeError as error:  # kfp's error for a failed step; the step itself has reported the reason
            print(error, flush=True)
            return _exit_code(folders, failure, since_s=started_s)
        except OSError:  # of kfp's own files or the log, on a full disk: a step's earlier error is more exact
            if not failure.exists():
                raise
            return _exit_code(folders, failure, since_s=started_s)
    return ExitCode.OK


@contextmanager
def print_put_back() -> Iterator[None]:
    """kfp.local replaces `print` to indent the output of steps, and steps of a loop, in threads, leave it replaced."""
    before = builtins.print
    try:
        yield
    finally:
        builtins.print = before


def _pass_on_stop_requests() -> None:
    def stop(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group includes this process, which still runs notify
        os.environ[STOPPED_VARIABLE] = "1"
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


def _exit_code(folders: Sequence[str], failure: Path, *, since_s: float) -> int:
    """The exit code in the failed step's record, because kfp only reports that it failed. `folders` are the stages'.

    A record that is still open belongs to a step that could not write it, but wrote `failure`, or to one that was
    killed. It is closed here; if that fails too, on a full disk, the error is raised (exit 73).
    """
    left = read_record_file(failure)
    records = [(record, store) for store in map(open_storage, folders) for record in read_steps(store)]
    for record, store in sorted(records, key=lambda pair: pair[0].started_s):
        if record.started_s < since_s or record.state not in ("failed", "stopped", "running"):
            continue
        if record.state == "running":
            record.state, record.ended_s = "failed", time.time()
            record.detail |= left or KILLED
            record.message = record.detail["error"].splitlines()[0]
            record.write(store)
        return int(record.detail.get("exit_code", ExitCode.UNEXPECTED))
    if os.environ.get(STOPPED_VARIABLE):
        return ExitCode.PREEMPTED
    return int(left.get("exit_code", ExitCode.UNEXPECTED))


def main(arguments: list[str] | None = None) -> int:
    """Run the pipeline of a run file on this machine."""
    parser = argparse.ArgumentParser(prog="vlmpipe.pipelines.local_runner", description=__doc__)
    parser.add_argument("--config", required=True, help="path of the run file")
    parser.add_argument("--run-id", required=True, help="name of the run and of its folder")
    jobs = "vlmpipe/platforms/local/jobs"
    parser.add_argument("--retries", help=f"restarts of each replica of a job that fails; see {jobs}/restart_policy.py")
    parser.add_argument("--inject-fault", help=f"faults of the training job; see {jobs}/fault_spec.py")
    options = parser.parse_args(arguments)
    # kfp.local's steps inherit the environment; a step's inputs are those of the step on Vertex AI.
    for variable, value in ((RETRIES_VARIABLE, options.retries), (FAULTS_VARIABLE, options.inject_fault)):
        os.environ.pop(variable, None)
        if value:
            os.environ[variable] = value
    from vlmpipe.config.run_config import load_run_file

    return run_local(load_run_file(options.config), run_id=options.run_id)


if __name__ == "__main__":
    sys.exit(run_main(main))
