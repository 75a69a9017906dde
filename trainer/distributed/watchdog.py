"""Ends a job that makes no progress, and leaves the stacks of its ranks.

A stalled collective holds a machine for as long as its timeout allows, and then says nothing of the rank that did not
come. So each rank has a thread that knows how long steps take. All ranks stall together, since each step has a
collective: every rank's own watchdog fires within one step's time of the others, and no message between ranks, over the
network that may be the cause, is needed.
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
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.config.job import JobConfig
from trainer.distributed.process import COLLECTIVE_TIMEOUT, ProcessContext, leave
from trainer.errors import ExitCode, UserError, print_error
from trainer.redaction import redact
from trainer.storage import open_storage

STACKS_FOLDER = "logs/stacks"
REMEMBERED_STEPS = 101
POLLS = 40  # looks at the clock in one limit
LONGEST_POLL_S = 5.0
# The collective's own timeout ends the process without a trace: stacks are taken before it does.
LOOK_BEFORE_S = 0.9 * COLLECTIVE_TIMEOUT.total_seconds()
SAY_S = 5.0
UPLOAD_S = 20.0  # a store that does not answer may be why the job stalls
GATHER_S = 10.0  # torchrun ends all ranks of a node when one leaves: time for the others to reach their own limit


class Watchdog:
    """Watches one rank from its first `beat` to `close` or the end of its process; not with `train.stall_factor` 0."""

    def __init__(self, job: JobConfig, worker: ProcessContext, *, end: Callable[[int], object] = leave) -> None:
        self._factor, self._floor_s = job.train.stall_factor, job.train.stall_floor_s
        self._run_uri, self._worker, self._end = job.run.run_uri, worker, end
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._step: int | None = None
        self._began_s = time.monotonic()
        self._quiet_s = 0.0
        self._pauses = 0
        self._looked = False
        self._changed = threading.Condition()
        self._closed = not self._factor
        if not self._closed:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, step: int) -> None:
        """Say that `step` is done. The first beat starts the watch: compiling and loading come before it."""
        with self._changed:
            now_s = time.monotonic()
            if self._step is not None:
                self._seconds.append(now_s - self._began_s)
            self._step, self._looked, self._began_s, self._quiet_s = step, False, now_s, 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time in this block: saving, evaluating, compiling."""
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
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def limit_s(self) -> float:
        """Seconds without a step that are a stall."""
        return max(self._floor_s, self._factor * statistics.median(self._seconds or [0.0]))

    def _watch(self) -> None:
        poll_s = min(LONGEST_POLL_S, self._floor_s / POLLS)
        looked_s = time.monotonic()
        while not self._sleep(poll_s):
            before_s, looked_s = looked_s, time.monotonic()
            with self._changed:
                if self._step is None or self._pauses:
                    continue
                # A process that was frozen as a whole, such as in a virtual machine that is moved, has not stalled.
                self._quiet_s += min(looked_s - before_s, 2 * poll_s)
                step, quiet_s, limit_s = self._step, self._quiet_s, self.limit_s
                look = quiet_s >= min(limit_s, LOOK_BEFORE_S) and not self._looked
                self._looked = self._looked or look
            if look:
                self._leave_stacks(step, quiet_s, limit_s)
            if quiet_s >= limit_s and not self._moves_after_all(step):
                self._give_up(step, quiet_s, limit_s)
                return

    def _sleep(self, seconds: float) -> bool:
        """Wait; True when the watch is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def _moves_after_all(self, step: int) -> bool:
        """Leave the other ranks the time to reach their own limit; True if a step is done meanwhile."""
        if self._worker.world_size > 1:
            self._sleep(min(GATHER_S, self._floor_s / 4))
        with self._changed:
            return self._closed or self._step != step or self._pauses > 0

    def _leave_stacks(self, step: int, quiet_s: float, limit_s: float) -> None:
        text = (
            f"rank {self._worker.rank} on {socket.gethostname()}, process {os.getpid()}: no step for {quiet_s:.1f} s\n"
            f"last step: {step}; limit: {limit_s:.1f} s\n"
            f"main thread: 0x{threading.main_thread().ident:016x}\n"
            f"{stacks_of_all_threads()}"
        )
        text = redact(text)  # of the source lines in it, one may hold a secret

        def keep() -> None:
            with contextlib.suppress(UserError):  # they are in the log as well
                name = f"{STACKS_FOLDER}/rank-{self._worker.rank}.txt"
                open_storage(self._run_uri).write(name, text.encode())

        def say() -> None:
            sys.stderr.write(text)
            sys.stderr.flush()

        within(UPLOAD_S, keep, say)

    def _give_up(self, step: int, quiet_s: float, limit_s: float) -> None:
        median_s = statistics.median(self._seconds or [0.0])
        error = UserError(
            f"rank {self._worker.rank} has made no step for {quiet_s:.1f} s after step {step}",
            expected=f"a step at least every {limit_s:.1f} s: train.stall_floor_s, or train.stall_factor times the "
            f"median of {median_s:.2f} s",
            fix=f"vlmpipe diagnose says where the ranks stand (stacks in {self._run_uri}/{STACKS_FOLDER}); "
            "start again: the run continues from its last checkpoint",
            code=ExitCode.STALLED,
        )
        within(SAY_S, lambda: print_error(error))
        within(SAY_S, lambda: self._end(int(ExitCode.STALLED)))
        if self._end is leave:  # not even the log takes a line
            os._exit(ExitCode.STALLED)


def within(seconds: float, *actions: Callable[[], object]) -> None:
    """Do these at once, and wait for them no longer than this: a full pipe or a dead network may hold them for ever."""
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def stacks_of_all_threads() -> str:
    """What each thread of this process is doing, as faulthandler says it: the most recent call first."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-stacks-") as folder:
        path = Path(folder, "stacks")
        with path.open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        return path.read_text()
