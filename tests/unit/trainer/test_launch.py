"""How a node's job ends: one exit code from what each of its ranks left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer import launch as launch_module
from vlmpipe.trainer.distributed.cluster_env import LAUNCHED_VARIABLE
from vlmpipe.trainer.errors import EXIT_FOLDER_VARIABLE, ExitCode, UserError
from vlmpipe.trainer.launch import TorchrunEnd, _exit_code

FAILED = TorchrunEnd(ExitCode.UNEXPECTED)


def left(folder: Path, *codes: int) -> Path:
    for rank, code in enumerate(codes):
        (folder / f"rank-{rank}").write_text(str(code))
    return folder


@pytest.mark.parametrize(
    ("codes", "ended", "expected"),
    [
        ([0, 0], TorchrunEnd(ExitCode.OK), ExitCode.OK),
        ([75, 75], FAILED, ExitCode.PREEMPTED),
        ([75, 1], FAILED, ExitCode.UNEXPECTED),
        ([1, 65], FAILED, ExitCode.DATA),
        ([75, 73, 1], FAILED, ExitCode.CANNOT_WRITE),
        ([], FAILED, ExitCode.UNEXPECTED),
        ([73], TorchrunEnd(ExitCode.UNEXPECTED, killed=(1, signal.SIGKILL)), ExitCode.CANNOT_WRITE),
    ],
)
def test_the_code_that_names_a_cause_wins(codes: list[int], ended: TorchrunEnd, expected: int, tmp_path: Path) -> None:
    assert _exit_code(left(tmp_path, *codes), ended) == expected


@pytest.mark.parametrize(
    ("number", "about_memory"), [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGBUS, False)]
)
def test_killed_rank_is_named_despite_the_others_lost_connections(
    number: signal.Signals, about_memory: bool, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"rank 3 was ended by {number.name}") as caught:
        _exit_code(left(tmp_path, 1, 1), TorchrunEnd(ExitCode.UNEXPECTED, killed=(3, number)))
    assert caught.value.code == 128 + number
    assert ("lack of memory" in caught.value.fix) == about_memory


@pytest.mark.parametrize(
    ("number", "later_s", "is_cause"),
    [(signal.SIGTERM, 0.0, False), (signal.SIGKILL, 30.0, False), (signal.SIGKILL, 1.0, True)],
    ids=["asked to end", "killed as it did not end", "killed first"],
)
def test_ranks_that_torchrun_ends_hide_no_error(number: int, later_s: float, is_cause: bool, tmp_path: Path) -> None:
    """Of a job that is no training, whose ranks end by SIGTERM, a GPU out of memory was reported as a stopped run."""
    left(tmp_path, 1)
    ended = TorchrunEnd(ExitCode.UNEXPECTED, killed=(1, number), killed_s=int(time.time() + later_s))
    with pytest.raises(UserError, match="ended by SIGKILL") if is_cause else contextlib.nullcontext():
        assert _exit_code(tmp_path, ended) == ExitCode.UNEXPECTED


@pytest.mark.slow
def test_an_error_of_one_process_of_two_is_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "tiny_job.py").write_text(LEAVE + "leave(1) if os.environ['RANK'] == '0' else signal.pause()\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("CLUSTER_SPEC", "TF_CONFIG")}
    job = subprocess.run(
        [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "2", "--", "tiny_job"],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
    )
    assert job.returncode == ExitCode.UNEXPECTED, job.stdout + job.stderr
    assert "rank 0 (code 1" in job.stdout and "rank 1 (SIGTERM" in job.stdout


@pytest.mark.parametrize(
    ("processes", "given", "expected"), [("4", None, "3"), ("16", None, "1"), ("4", "1", "1"), ("1", None, None)]
)
def test_several_processes_share_the_machines_processors(
    processes: str, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single one is left to torch, which knows more of its processors."""
    seen: list[str | None] = []

    def ended(*_: Any) -> TorchrunEnd:
        seen.append(os.environ.get("OMP_NUM_THREADS"))
        return TorchrunEnd(ExitCode.OK)

    for name in ("_torchrun", "_one_process"):
        monkeypatch.setattr(launch_module, name, ended)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    for name in (EXIT_FOLDER_VARIABLE, launch_module.ALLOCATOR_VARIABLES[0]):  # which the launcher sets
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch_module.main(["--nproc-per-node", processes, "--", "some.module"]) == ExitCode.OK
    assert seen == [expected]


@pytest.mark.parametrize("given", [None, *launch_module.ALLOCATOR_VARIABLES])
def test_segments_of_gpu_memory_grow_unless_the_environment_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def ended(*_: Any) -> TorchrunEnd:
        seen.append({name: value for name in launch_module.ALLOCATOR_VARIABLES if (value := os.environ.get(name))})
        return TorchrunEnd(ExitCode.OK)

    monkeypatch.setattr(launch_module, "_one_process", ended)
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    for name in (EXIT_FOLDER_VARIABLE, LAUNCHED_VARIABLE, *launch_module.ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "")
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    began_s = time.monotonic()
    assert launch_module.main(["--nproc-per-node", "1", "--", "some.module"]) == ExitCode.OK
    assert began_s <= float(os.environ[LAUNCHED_VARIABLE]) <= time.monotonic(), "a probe's time is counted from here"
    assert seen == [{given: "max_split_size_mb:64"} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]


def test_torchrun_leaves_processes_the_time_that_who_stops_them_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def ended(arguments: list[str]) -> TorchrunEnd:
        from torch.distributed.run import config_from_args, parse_args

        seen.append(config_from_args(parse_args(arguments))[0].shutdown_timeout)
        return TorchrunEnd(ExitCode.OK)

    monkeypatch.setattr(launch_module, "_torchrun", ended)
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    monkeypatch.delenv(launch_module.SHUTDOWN_VARIABLE, raising=False)
    for name in (EXIT_FOLDER_VARIABLE, launch_module.ALLOCATOR_VARIABLES[0], "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    assert launch_module.main(["--nproc-per-node", "2", "--", "some.module"]) == ExitCode.OK
    assert seen == [launch_module.SHUTDOWN_S]


@pytest.mark.slow
def test_processes_that_save_for_35_seconds_after_a_stop_are_not_killed(tmp_path: Path) -> None:
    program = """
import time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(35), leave(75)))
print("ready", flush=True)
while True:
    signal.pause()
"""
    (tmp_path / "tiny_job.py").write_text(LEAVE + program)
    environment = {name: value for name, value in os.environ.items() if name not in ("CLUSTER_SPEC", "TF_CONFIG")}
    job = subprocess.Popen(
        [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "2", "--", "tiny_job"],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout
    ready = itertools.islice((line for line in job.stdout if "ready" in line), 2)
    assert len(list(ready)) == 2
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=120)
    assert job.returncode == ExitCode.PREEMPTED


# ---- a job of one process, which needs no torchrun

LEAVE = """
import json, os, pathlib, signal, sys
def leave(code):
    pathlib.Path(os.environ["VLMPIPE_EXIT_FOLDER"], "rank-" + os.environ["RANK"]).write_text(str(code))
    sys.exit(code)
"""


def launch(folder: Path, program: str, *arguments: str, code: str = "") -> subprocess.Popen[str]:
    """The launcher with `program` as the job's module; torch cannot be imported. `code` is run instead of it."""
    (folder / "tiny_job.py").write_text(LEAVE + program)
    (folder / "torch.py").write_text('raise ImportError("a job of one process needs no torch in its launcher")')
    environment = {name: value for name, value in os.environ.items() if name not in ("CLUSTER_SPEC", "TF_CONFIG")}
    command = (
        ["-c", code]
        if code
        else ["-m", "vlmpipe.trainer.launch", "--nproc-per-node", "1", "--", "tiny_job", *arguments]
    )
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.DATA, ExitCode.PREEMPTED])
def test_one_process_sees_the_variables_of_torchrun_and_its_code_is_the_jobs(code: int, tmp_path: Path) -> None:
    program = 'print("seen", json.dumps([sys.argv[1:], dict(os.environ)])); leave(int(sys.argv[1]))'
    job = launch(tmp_path, program, str(int(code)), "--flag")
    said, _ = job.communicate(timeout=60)
    assert job.returncode == code, said
    arguments, seen = json.loads(next(line for line in said.splitlines() if line.startswith("seen ")).split(" ", 1)[1])
    assert arguments == [str(int(code)), "--flag"]
    assert {seen[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")} == {"0"}
    assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["MASTER_ADDR"]) == ("1", "1", "127.0.0.1")
    assert int(seen["MASTER_PORT"]) > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded_to_the_only_process(number: signal.Signals, tmp_path: Path) -> None:
    # Waited for, not handled: a handler of Python does not run in a `pause` that begins just after the signal.
    program = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
print("ready", flush=True)
signal.sigwait([{int(number)}])
leave(75)
"""
    job = launch(tmp_path, program)
    assert job.stdout
    assert any(line == "ready\n" for line in job.stdout)
    job.send_signal(number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == ExitCode.PREEMPTED, said


def test_early_signal_reaches_the_process(tmp_path: Path) -> None:
    """Sent by the launcher to itself while it starts the process."""
    starting = """
import os, signal, subprocess, sys
real = subprocess.Popen
def start(*arguments, **options):
    if "tiny_job" in arguments[0]:  # not of the guard
        os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments, **options)
subprocess.Popen = start
from vlmpipe.trainer.launch import main
sys.exit(main(["--nproc-per-node", "1", "--", "tiny_job"]))
"""
    # It would pause for ever; the default action of SIGTERM ends it.
    job = launch(tmp_path, "signal.pause()", code=starting)
    said, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "rank 0 was ended by SIGTERM" in said


def test_one_process_that_is_killed_is_named(tmp_path: Path) -> None:
    job = launch(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    assert "the process of rank 0 was ended by SIGKILL" in said
    assert "Traceback" not in said
