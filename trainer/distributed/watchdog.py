"""Ends a job that makes no progress, after writing the stacks of its ranks.

A stalled collective blocks a machine until its timeout, and its error does not name the missing rank. So a thread of
each rank knows how long steps take. Each step has a collective, so all ranks stall together and their watchdogs fire
within one step's time of each other, without messages over a network that may be the cause.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import COLLECTIVE_TIMEOUT, ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError, leave, print_error
from vlmpipe.trainer.redaction import redact
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.threads import start_thread

STACKS_FOLDER = "logs/stacks"
REMEMBERED_STEPS = 101
POLLS = 40  # in the shortest limit
MAX_POLL_S = 5.0
# Write stacks before the collective's own timeout ends the process.
DUMP_BEFORE_S = 0.9 * COLLECTIVE_TIMEOUT.total_seconds()
PRINT_S = 5.0
UPLOAD_S = 20.0  # storage that does not answer may be why the job stalls
GRACE_S = 10.0  # torchrun ends all ranks of a node when one ends: time for the others to reach their limits


class Watchdog:
    """Watches one rank from its first `beat` to `close`; inactive with `train.stall_factor` 0."""

    def __init__(self, job: JobConfig, worker: ProcessContext, *, end: Callable[[int], object] = leave) -> None:
        self._factor, self._floor_s = job.train.stall_factor, job.train.stall_floor_s
        self._run_uri, self._worker, self._end = job.run.run_uri, worker, end
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._step: int | None = None
        self._began_s = time.monotonic()
        self._quiet_s = 0.0
        self._pauses = 0
        self._dumped = False
        self._changed = threading.Condition()
        self._closed = not self._factor
        if not self._closed:
            start_thread(self._watch, name="watchdog")

    def beat(self, step: int) -> None:
        """Report that `step` is done. The first call starts the watch, after loading and compiling."""
        with self._changed:
            now_s = time.monotonic()
            if self._step is not None:
                self._seconds.append(now_s - self._began_s)
            self._step, self._dumped, self._began_s, self._quiet_s = step, False, now_s, 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time in this block, such as for saving or evaluating."""
        started_s = time.monotonic()
        with self._changed:
            self._pauses += 1
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._began_s += time.monotonic() - started_s
                self._quiet_s = 0.0

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def limit_s(self) -> float:
        """Seconds without a step that count as a stall."""
        return max(self._floor_s, self._factor * statistics.median(self._seconds or [0.0]))

    def _watch(self) -> None:
        poll_s = min(MAX_POLL_S, self._floor_s / POLLS)
        now_s = time.monotonic()
        while not self._sleep(poll_s):
            before_s, now_s = now_s, time.monotonic()
            with self._changed:
                if self._step is None or self._pauses:
                    continue
                # A process that was frozen as a whole, such as in a migrating virtual machine, has not stalled.
                self._quiet_s += min(now_s - before_s, 2 * poll_s)
                step, quiet_s, limit_s = self._step, self._quiet_s, self.limit_s
                dump = quiet_s >= min(limit_s, DUMP_BEFORE_S) and not self._dumped
                self._dumped = self._dumped or dump
            if dump:
                self._dump_stacks(step, quiet_s, limit_s)
            if quiet_s >= limit_s and not self._recovers(step):
                self._give_up(step, quiet_s, limit_s)
                return

    def _sleep(self, seconds: float) -> bool:
        """Wait; True once closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def _recovers(self, step: int) -> bool:
        """Give the other ranks time to reach their limits; True if a step is done meanwhile."""
        if self._worker.world_size > 1:
            self._sleep(min(GRACE_S, self._floor_s / 4))
        with self._changed:
            return self._closed or self._step != step or self._pauses > 0

    def _dump_stacks(self, step: int, quiet_s: float, limit_s: float) -> None:
        text = (
            f"rank {self._worker.rank} on {socket.gethostname()}, process {os.getpid()}: no step for {quiet_s:.1f} s\n"
            f"last step: {step}; limit: {limit_s:.1f} s\n"
            f"main thread: 0x{threading.main_thread().ident:016x}\n"
            f"{stacks_of_all_threads()}"
        )
        text = redact(text)  # source lines may hold a secret

        def upload() -> None:
            with contextlib.suppress(UserError):  # the log has them too
                name = f"{STACKS_FOLDER}/rank-{self._worker.rank}.txt"
                open_storage(self._run_uri).write(name, text.encode())

        within(UPLOAD_S, upload, lambda: print(text, end="", file=sys.stderr, flush=True))

    def _give_up(self, step: int, quiet_s: float, limit_s: float) -> None:
        median_s = statistics.median(self._seconds or [0.0])
        error = UserError(
            f"rank {self._worker.rank} has made no step for {quiet_s:.1f} s after step {step}",
            expected=f"a step at least every {limit_s:.1f} s: train.stall_floor_s, or train.stall_factor times the "
            f"median of {median_s:.2f} s",
            fix=f"vlmpipe diagnose shows where the ranks hang (stacks in {self._run_uri}/{STACKS_FOLDER}); "
            "start again: the run continues from its last checkpoint",
            code=ExitCode.STALLED,
        )
        within(PRINT_S, lambda: print_error(error))
        within(PRINT_S, lambda: self._end(int(ExitCode.STALLED)))
        if self._end is leave:  # it did not end: standard output or error blocks
            os._exit(ExitCode.STALLED)


def within(seconds: float, *actions: Callable[[], object]) -> None:
    """Run the actions in threads and wait this long at most: a full pipe or a dead network may block them forever."""
    threads = [start_thread(action, name="action") for action in actions]
    deadline_s = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def stacks_of_all_threads() -> str:
    """Each thread's stack in faulthandler's form, the most recent call first.

    faulthandler ends with the 100th thread, the youngest first: the main thread then comes before the others.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        stacks = file.read()
    main = threading.main_thread().ident
    assert main is not None
    if f"hread 0x{main:016x} " in stacks or main not in (frames := sys._current_frames()):
        return stacks
    calls = "".join(
        f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'
        for frame, line in traceback.walk_stack(frames[main])
    )
    return f"Thread 0x{main:016x} (most recent call first):\n{calls}\n{stacks}"
