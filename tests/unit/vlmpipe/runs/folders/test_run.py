"""How the process behind a run is started, stopped and swept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.api import run as run_whole
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.platforms.local import control as local_control
from vlmpipe.platforms.local.process import PipelineProcess, execute
from vlmpipe.runs.folders.choice import open_run
from vlmpipe.runs.folders.lock import is_running
from vlmpipe.runs.folders.marker import read_marker
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.runs.folders.run import LocalRun, require_writable
from vlmpipe.runs.folders.summary import report_of
from vlmpipe.runs.run_state import RunState
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record_file

ARGUMENTS = ["configs/digits.yaml", "train.epochs=2"]
# A pipeline of one step, in place of the real one: it tells its process id, then does as it is told.
PIPELINE = """
import json, os, pathlib, signal, sys, time
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / "steps").mkdir(exist_ok=True)
(folder / "pid").write_text(str(os.getpid()))
def record(state, **fields):
    text = json.dumps({"step": "train", "state": state, "started_s": time.time(), **fields})
    (folder / "steps" / "new").write_text(text)
    (folder / "steps" / "new").rename(folder / "steps" / "train.json")
def stop(*_):
    checkpoint = folder / "checkpoints" / "0000-00000007-abc"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMIT").write_text("{}")
    record("stopped", message="stopped on request")
    sys.exit(75)
if what == "stoppable":
    signal.signal(signal.SIGTERM, stop)
def fill(*_):
    record("failed", message="no space left", detail={"exit_code": 73, "error": "no space left"})
    sys.exit(73)
if what == "full disk":
    signal.signal(signal.SIGTERM, fill)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
record("running", total=10)
if what == "fail":
    record("failed", message="bad data", detail={"exit_code": 65})
    print("error: bad data")
    sys.exit(1)
if what == "pass":
    record("done")
    sys.exit(0)
while True:
    signal.pause()
"""


class Watcher:
    """A view that presses Ctrl-C each time it sees training run, up to `presses` times."""

    def __init__(self, presses: int = 0) -> None:
        self.presses, self.notes, self.closed = presses, list[str](), False

    def update(self, state: RunState) -> None:
        if state.step("train").state == "running" and self.presses:
            self.presses -= 1
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run_file(ROOT / "configs" / "digits.yaml", [f"output.root_uri={tmp_path}"])


@pytest.fixture
def carry_out() -> Callable[[LocalRun, str, Watcher], int]:
    def carry_out(run: LocalRun, what: str, view: Watcher) -> int:
        return execute(run, view, [sys.executable, "-c", PIPELINE, str(run.folder), what])

    return carry_out


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_on_another_machine_is_refused(config: RunConfig) -> None:
    remote = config.model_copy(update={"output": config.output.model_copy(update={"root_uri": "gs://b/x"})})
    with pytest.raises(ConfigError, match=r"output\.root_uri is gs://b/x"):
        open_run(remote, ARGUMENTS)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, ExitCode.NO_PERMISSION),
        (errno.EROFS, ExitCode.NO_PERMISSION),
        (errno.ENOSPC, ExitCode.CANNOT_WRITE),
        (errno.ENOENT, ExitCode.CANNOT_WRITE),
    ],
)
def test_an_output_folder_that_cannot_be_written_is_refused(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(**_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr("vlmpipe.runs.folders.run.tempfile.TemporaryDirectory", make)
    with pytest.raises(UserError, match=rf"nothing can be made in {tmp_path}: {os.strerror(number)}") as caught:
        require_writable(tmp_path / "runs" / "deep")
    assert caught.value.code == code


def test_the_output_folder_is_tried_before_the_plan_is_made(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(_: RunConfig) -> list[str]:
        raise AssertionError("the plan was made first")

    monkeypatch.setattr("vlmpipe.planner.sweep.require_runnable", planned)
    output = config.output.model_copy(update={"root_uri": "/sys/vlmpipe"})  # in which not even root may make a folder
    with pytest.raises(UserError, match=r"output\.root_uri is /sys/vlmpipe") as caught:
        run_whole(config.model_copy(update={"output": output}))
    assert caught.value.code == ExitCode.NO_PERMISSION


def test_a_run_belongs_to_one_process_at_a_time(config: RunConfig) -> None:
    run = open_run(config, ARGUMENTS)
    with pytest.raises(UserError, match="is already running") as caught:
        open_run(config, ARGUMENTS)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert f"vlmpipe cancel {run.folder}" in caught.value.fix
    assert is_running(run.folder)
    run.close(1)
    assert not is_running(run.folder)
    open_run(config, ARGUMENTS).close(1)


def test_the_copy_of_the_run_file_holds_the_overrides(tmp_path: Path, config: RunConfig) -> None:
    changed = load_run_file(ROOT / "configs" / "digits.yaml", [f"output.root_uri={tmp_path}", "train.epochs=7"])
    run = open_run(changed, ARGUMENTS)
    assert load_run_file(run.folder / "run_file.json") == changed != config
    run.close(0)


def test_a_run_that_goes_through_is_recorded_as_done(config: RunConfig, carry_out: Callable[..., int]) -> None:
    run, view = open_run(config, ARGUMENTS), Watcher()
    assert carry_out(run, "pass", view) == 0
    assert view.closed
    assert report_of(run.folder).outcome == "done"
    assert open_run(config, ARGUMENTS).folder != run.folder


def test_the_exit_code_is_the_failing_steps(config: RunConfig, carry_out: Callable[..., int]) -> None:
    run = open_run(config, ARGUMENTS)
    assert carry_out(run, "fail", Watcher()) == ExitCode.DATA
    lines = report_of(run.folder).lines()
    assert lines[0].startswith("error: step train failed with exit code 65")
    assert lines.count("  bad data") == 1
    assert lines[-1] == "  continue: vlmpipe run configs/digits.yaml train.epochs=2"


def test_the_report_of_a_failed_run_has_the_diagnosis_and_that_of_the_next_attempt_has_not(
    config: RunConfig, carry_out: Callable[..., int]
) -> None:
    run = open_run(config, ARGUMENTS)
    (run.folder / "run.json").write_text("{}")
    carry_out(run, "fail", Watcher())
    assert read_record_file(run.folder / "diagnosis.json")["exit_code"] == ExitCode.DATA
    assert "Cause" in (run.folder / "report.html").read_text(encoding="utf-8")
    again = open_run(config, ARGUMENTS, run_id=run.marker.run_id)
    assert carry_out(again, "pass", Watcher()) == 0
    assert not (run.folder / "diagnosis.json").exists()


def test_ctrl_c_waits_for_the_checkpoint_and_the_same_command_continues(
    config: RunConfig, carry_out: Callable[..., int]
) -> None:
    run, view = open_run(config, ARGUMENTS), Watcher(presses=1)
    assert carry_out(run, "stoppable", view) == ExitCode.INTERRUPTED
    assert view.notes == ["Stopping: progress is being saved. Ctrl-C again stops at once."]
    lines = report_of(run.folder).lines()
    assert lines[0].startswith("Stopped in train")
    assert "  a checkpoint at step 7 is saved" in lines
    assert "  to continue:  vlmpipe run configs/digits.yaml train.epochs=2" in lines
    again = open_run(config, ARGUMENTS)
    assert again.folder == run.folder
    assert "which was stopped" in again.introduction()[0]
    again.close(0)


def test_a_run_can_be_cancelled_from_elsewhere(config: RunConfig, carry_out: Callable[..., int]) -> None:
    class Canceller(Watcher):
        def update(self, state: RunState) -> None:
            if state.step("train").state == "running" and not self.notes:
                assert local_control.cancel(report_of(run.folder))

    run, view = open_run(config, ARGUMENTS), Canceller()
    assert carry_out(run, "stoppable", view) == ExitCode.INTERRUPTED
    assert newest_checkpoint_step(LocalStorage(run.folder)) == 7


def test_what_goes_wrong_while_stopping_is_a_failure(config: RunConfig, carry_out: Callable[..., int]) -> None:
    run = open_run(config, ARGUMENTS)
    assert carry_out(run, "full disk", Watcher(presses=1)) == ExitCode.CANNOT_WRITE
    lines = report_of(run.folder).lines()
    assert lines[:2] == [f"error: step train failed with exit code 73: run {run.folder.name}", "  no space left"]


def test_a_view_that_breaks_stops_the_run_but_does_not_abandon_it(
    config: RunConfig, carry_out: Callable[..., int]
) -> None:
    class BrokenView(Watcher):
        def update(self, state: RunState) -> None:
            if state.step("train").state == "running":
                raise OSError(errno.EIO, "the terminal is gone")

    run, view = open_run(config, ARGUMENTS), BrokenView()
    with pytest.raises(OSError, match="the terminal is gone"):
        carry_out(run, "stoppable", view)
    assert not is_alive(int((run.folder / "pid").read_text()))
    assert newest_checkpoint_step(LocalStorage(run.folder)) == 7 and view.closed


def test_a_pipeline_that_does_not_stop_is_killed(config: RunConfig, carry_out: Callable[..., int]) -> None:
    run = open_run(config, ARGUMENTS)
    assert carry_out(run, "deaf", Watcher(presses=2)) == ExitCode.INTERRUPTED
    assert not is_alive(int((run.folder / "pid").read_text()))


def test_signal_handlers_are_put_back(config: RunConfig, carry_out: Callable[..., int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    carry_out(open_run(config, ARGUMENTS), "pass", Watcher())
    assert signal.getsignal(signal.SIGINT) is before


def test_threads_run_two_runs_at_once_and_are_stopped_one_by_one(config: RunConfig, tmp_path: Path) -> None:
    """Without handlers of signals: only the main thread may set them, and it belongs to another program."""
    before = signal.getsignal(signal.SIGINT)
    runs = [open_run(config, ARGUMENTS, run_id=f"thread-{number}") for number in (1, 2)]

    class Canceller(Watcher):
        def __init__(self, run: LocalRun) -> None:
            super().__init__()
            self.run = run

        def update(self, state: RunState) -> None:
            if state.step("train").state == "running" and not self.notes:
                self.note("asked")
                assert local_control.cancel(report_of(self.run.folder))

    def carry_out(run: LocalRun) -> int:
        return execute(run, Canceller(run), [sys.executable, "-c", PIPELINE, str(run.folder), "stoppable"])

    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(carry_out, runs))
    assert codes == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    assert all(newest_checkpoint_step(LocalStorage(run.folder)) == 7 for run in runs)
    assert all(report_of(run.folder).outcome == "stopped" for run in runs)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failure_before_the_start_releases_the_run(config: RunConfig) -> None:
    def broken(text: str) -> None:
        raise OSError(errno.EIO, "the log is gone")

    for _ in range(2):  # the second finds no run that is "already running"
        with pytest.raises(OSError, match="the log is gone"):
            run_whole(config, run_id="same", say=broken)


def test_a_request_to_stop_before_the_start_stops_the_run(
    config: RunConfig, carry_out: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = PipelineProcess.__init__

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        started(*arguments)

    monkeypatch.setattr(PipelineProcess, "__init__", interrupted)
    view = Watcher()
    assert carry_out(open_run(config, ARGUMENTS), "deaf", view) in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
    assert view.notes[0].startswith("Stopping")


# `vlmpipe run`, with the one-step pipeline above.
PROGRAM = """
import sys
from vlmpipe.platforms.local.process import execute
from vlmpipe.config.run_config import load_run_file
from vlmpipe.runs.live_view import view_for
from vlmpipe.runs.folders.choice import open_run
file, root, pipeline, what = sys.argv[1:]
run = open_run(load_run_file(file, [f"output.root_uri={root}"]), ["c.yaml"], run_id="mine")
sys.exit(execute(run, view_for(plain=True, say=print), [sys.executable, "-c", pipeline, str(run.folder), what]))
"""


@pytest.fixture
def killed(config: RunConfig, tmp_path: Path) -> Callable[[str], tuple[Path, int]]:
    def killed(what: str) -> tuple[Path, int]:
        """The folder of a run whose `vlmpipe run` was killed in training, and the pid of its orphaned pipeline."""
        folder, file = tmp_path / "runs/mine", str(ROOT / "configs/digits.yaml")
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, file, str(tmp_path), PIPELINE, what])
        record = folder / "steps/train.json"
        while not record.exists():
            assert program.poll() is None
            time.sleep(0.05)
        program.kill()
        program.wait()
        return folder, int((folder / "pid").read_text())

    return killed


def test_after_sigkill_the_same_command_waits_for_the_orphans_and_resumes(
    config: RunConfig, killed: Callable[[str], tuple[Path, int]]
) -> None:
    folder, pid = killed("stoppable")
    said = list[str]()
    run = open_run(config, ARGUMENTS, run_id="mine", say=said.append)
    assert not is_alive(pid)
    assert newest_checkpoint_step(LocalStorage(folder)) == 7, "the orphan saved its state"
    assert run.earlier and run.earlier.exit_code is None
    assert all("waiting for processes of a killed vlmpipe run" in line for line in said)
    run.close(0)


def test_orphans_that_do_not_end_are_named_and_cancel_ends_them(
    config: RunConfig, killed: Callable[[str], tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pid = killed("deaf")
    monkeypatch.setattr("vlmpipe.runs.folders.lock.ORPHANS_MAX_S", 1.0)
    said = list[str]()
    with pytest.raises(UserError, match=r"have not ended in 1 s: \d+") as caught:
        open_run(config, ARGUMENTS, run_id="mine", say=said.append)
    assert f"vlmpipe cancel {folder}" in caught.value.fix and len(said) == 1
    assert local_control.cancel(report_of(folder))
    monkeypatch.undo()
    open_run(config, ARGUMENTS, run_id="mine").close(0)
    assert not is_alive(pid)


def test_a_killed_attempt_counts_as_stopped(config: RunConfig) -> None:
    run = open_run(config, ARGUMENTS)
    os.close(run.lock)  # as the kernel does when the process dies
    stored = read_marker(run.folder)
    assert stored and stored.exit_code is None and stored.started_s <= time.time()
    assert report_of(run.folder).outcome == "stopped"
