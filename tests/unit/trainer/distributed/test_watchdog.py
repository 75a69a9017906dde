"""The watchdog: when it fires, when it does not, and what it leaves."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.clock import replace_time
from tests.support.paths import ROOT
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.distributed import watchdog as watchdog_module
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.distributed.watchdog import STACKS_FOLDER, Watchdog, stacks_of_all_threads
from vlmpipe.trainer.errors import ExitCode

FIRES_S = 20.0  # far longer than any limit here
QUIET_LIMITS = 4  # a watchdog that has not fired after so many limits does not

Make = Callable[..., Watchdog]


def watched_job(root: Path, factor: float, floor_s: float) -> JobConfig:
    train = JobConfig.model_fields["train"].annotation
    assert train is not None
    return JobConfig.model_construct(
        train=train.model_construct(stall_factor=factor, stall_floor_s=floor_s),
        run=RunPaths(run_id="run", root_uri=str(root)),
    )


@pytest.fixture
def ended() -> queue.SimpleQueue[int]:
    """The exit codes that watchdogs of this test ended with."""
    return queue.SimpleQueue()


@pytest.fixture
def make(tmp_path: Path, ended: queue.SimpleQueue[int]) -> Iterator[Make]:
    made: list[Watchdog] = []

    def make_one(*, factor: float = 2.0, floor_s: float = 0.2, world_size: int = 1) -> Watchdog:
        worker = ProcessContext(
            rank=0, world_size=world_size, local_rank=0, local_world_size=1, device=torch.device("cpu")
        )
        made.append(Watchdog(watched_job(tmp_path, factor, floor_s), worker, end=ended.put))
        return made[-1]

    yield make_one
    for watchdog in made:
        watchdog.close()


def nothing_ended(ended: queue.SimpleQueue[int], seconds: float) -> bool:
    try:
        ended.get(timeout=seconds)
    except queue.Empty:
        return True
    return False


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_step_for_the_limit_ends_the_process(make: Make, ended: queue.SimpleQueue[int], world_size: int) -> None:
    make(world_size=world_size).beat(1)
    assert ended.get(timeout=FIRES_S) == ExitCode.STALLED


def test_stacks_name_the_step_and_what_each_thread_does(
    make: Make, ended: queue.SimpleQueue[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make().beat(41)
    ended.get(timeout=FIRES_S)
    stacks = (tmp_path / "runs/run" / STACKS_FOLDER / "rank-0.txt").read_text()
    main = re.search(r"^main thread: (0x[0-9a-f]+)$", stacks, re.MULTILINE)
    assert main and f"hread {main[1]} " in stacks
    assert "last step: 41" in stacks and "test_stacks_name_the_step" in stacks
    said = capfd.readouterr().err
    assert stacks in said, "the log has them too: the store may be out of reach"
    assert "error: rank 0 has made no step for" in said


def test_the_main_thread_is_shown_among_more_threads_than_faulthandler_shows() -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        stacks = stacks_of_all_threads()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    main = f"Thread 0x{threading.main_thread().ident:016x} (most recent call first):\n"
    assert stacks.startswith(main)
    calls = stacks.split("\n\n")[0].splitlines()[1:]
    assert re.fullmatch(r'  File "[^"]+/watchdog.py", line \d+ in stacks_of_all_threads', calls[0])
    assert re.fullmatch(rf'  File "{re.escape(__file__)}", line \d+ in test_the_main_thread_is_shown\w+', calls[1])


def test_the_watch_begins_with_the_first_step(make: Make, ended: queue.SimpleQueue[int]) -> None:
    make(floor_s=0.1)
    assert nothing_ended(ended, QUIET_LIMITS * 0.1), "compiling and loading take as long as they take"


def test_regular_steps_do_not_trigger_the_watchdog(make: Make, ended: queue.SimpleQueue[int]) -> None:
    watchdog = make(floor_s=0.5)
    deadline_s = time.monotonic() + 2 * 0.5
    step = 0
    while time.monotonic() < deadline_s:
        step += 1
        watchdog.beat(step)
        assert nothing_ended(ended, 0.05)


def test_pauses_do_not_count_as_stalls(make: Make, ended: queue.SimpleQueue[int]) -> None:
    watchdog = make(floor_s=0.2)
    watchdog.beat(1)
    with watchdog.pause():
        assert nothing_ended(ended, QUIET_LIMITS * 0.2)
    assert ended.get(timeout=FIRES_S) == ExitCode.STALLED


def test_slow_steps_raise_the_limit_and_pauses_do_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    replace_time(monkeypatch, watchdog_module, monotonic=lambda: clock_s)
    watchdog = make(factor=20.0, floor_s=10.0)
    watchdog.close()  # no thread: this clock stands still
    for step in range(1, 6):
        watchdog.beat(step)
        with watchdog.pause():
            clock_s += 100.0
        clock_s += 3.0
    assert watchdog.limit_s == 60.0


def test_stall_factor_zero_disables_the_watchdog(make: Make, ended: queue.SimpleQueue[int]) -> None:
    make(factor=0.0, floor_s=0.05).beat(1)
    assert nothing_ended(ended, QUIET_LIMITS * 0.05)


STALLING = """
import sys, threading
from pathlib import Path
import torch
from tests.unit.trainer.distributed.test_watchdog import watched_job
from vlmpipe.trainer.distributed.watchdog import Watchdog
from vlmpipe.trainer.distributed.process import ProcessContext

def waits_for_ever():
    threading.Event().wait()

watchdog = Watchdog(watched_job(Path(sys.argv[1]), 2.0, 0.2), ProcessContext(3, 4, 3, 4, torch.device("cpu")))
watchdog.beat(7)
print("x" * 100, end="", flush=True)
waits_for_ever()
"""


@pytest.mark.parametrize("log_is_read", [True, False], ids=["log", "full-log"])
def test_stalled_process_exits_with_71_and_writes_stacks_and_code(tmp_path: Path, log_is_read: bool) -> None:
    reader, writer = os.pipe()
    if not log_is_read:  # nobody reads the log: every further write to it waits for ever
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
    environment = {**os.environ, "RANK": "3", "VLMPIPE_EXIT_FOLDER": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SHORT_PATIENCE + STALLING, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    assert process.wait(timeout=60) == 71
    os.close(reader)
    stacks = (tmp_path / "runs/run" / STACKS_FOLDER / "rank-3.txt").read_text()
    assert "in <module>" in stacks
    if log_is_read:
        assert "in waits_for_ever" in stacks
        assert (tmp_path / "rank-3").read_text() == "71"


SHORT_PATIENCE = "from vlmpipe.trainer.distributed import watchdog; watchdog.PRINT_S = watchdog.UPLOAD_S = 0.5\n"
