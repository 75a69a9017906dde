"""Time and tokens of each start of a run's training: `usage/<start>.json`, written while it trains.

A start that resumes drops the lines of steps that it makes again from metrics.jsonl, and replaces the times of the
step's record. What the starts before it took is in these files alone; of one that was killed, until its last write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record, seal

FOLDER = "usage"


@dataclass(frozen=True)
class StartUsage:
    """Steps are optimizer steps of the run, times Unix seconds."""

    start: int  # its number, as in ATTEMPTS.json
    began_s: float  # when the process of rank 0 began
    seen_s: float  # until when it is known to have run
    first_step: int  # steps of the run that were done before it
    last_step: int
    tokens: int = 0
    label_tokens: int = 0
    checkpoint_stall_s: float = 0.0


@dataclass(frozen=True)
class RunUsage:
    """Sums over the starts of a training. Lower bounds where a start was killed."""

    starts: int
    steps_made: int  # those that were made again each time
    steps_repeated: int
    tokens: int
    label_tokens: int
    seconds: float
    checkpoint_stall_s: float


class UsageLog:
    """Keeps the usage of this start. On rank 0 only."""

    def __init__(self, store: Storage, start: int, *, first_step: int, since: int = 0) -> None:
        """`since`: the first start that counts; resume=never gave up those before."""
        began_s = psutil.Process(os.getpid()).create_time()
        self._store, self._since = store, since
        self._own = StartUsage(start, began_s, time.time(), first_step, first_step)
        self._file = BackgroundWriter(store, _file(start))
        self._file.write(self._content())

    def note(self, last_step: int, *, tokens: int = 0, label_tokens: int = 0, checkpoint_stall_s: float = 0.0) -> None:
        """Note this start's progress. Written in the background, at most every few seconds."""
        self._own = replace(
            self._own,
            seen_s=time.time(),
            last_step=last_step,
            tokens=tokens,
            label_tokens=label_tokens,
            checkpoint_stall_s=checkpoint_stall_s,
        )
        if self._file.is_due:
            self._file.begin(self._content())

    def flush(self) -> None:
        """Write the last note now; after some seconds nothing waits for it."""
        self._own = replace(self._own, seen_s=time.time())
        self._file.settle(self._content())

    def close(self) -> RunUsage:
        """Write this start's usage. Returns that of the run."""
        self._own = replace(self._own, seen_s=time.time())
        self._file.write(self._content())
        return total_of(read_usage(self._store, since=self._since))

    def _content(self) -> bytes:
        return seal(asdict(self._own))


def read_usage(store: Storage, *, since: int = 0) -> list[StartUsage]:
    """Return the usage of each start of training from number `since` on, in order."""
    starts = [StartUsage(**read_record(store, info.name)) for info in store.list(FOLDER)]
    return sorted((start for start in starts if start.start >= since), key=lambda start: start.start)


def total_of(starts: Sequence[StartUsage]) -> RunUsage:
    """Sums over at least one start."""
    made = sum(start.last_step - start.first_step for start in starts)
    reached = starts[-1].last_step - min(start.first_step for start in starts)
    return RunUsage(
        starts=len(starts),
        steps_made=made,
        steps_repeated=made - reached,
        tokens=sum(start.tokens for start in starts),
        label_tokens=sum(start.label_tokens for start in starts),
        seconds=sum(start.seen_s - start.began_s for start in starts),
        checkpoint_stall_s=sum(start.checkpoint_stall_s for start in starts),
    )


def _file(start: int) -> str:
    return f"{FOLDER}/{start:04d}.json"


def goodput(lines: Sequence[Mapping[str, Any]], *, until_s: float) -> float | None:
    """Share of the time since the first step began, restarts included, that was spent on steps that count.

    `lines` are those of metrics.jsonl, which holds each step once, without steps that were lost and repeated. Time that
    training waited for data or a checkpoint does not count. None before anything was logged.
    """
    timed = [line for line in lines if "time_s" in line]  # earlier versions wrote no time
    if not timed:
        return None
    steps = [line["step"] - before["step"] for before, line in zip([{"step": 0}, *lines], lines, strict=False)]
    windows = [line["step_s"] * count for line, count in zip(lines, steps, strict=True) if "time_s" in line]
    lost_s = sum(line["data_wait_s"] + line["checkpoint_stall_s"] for line in timed)
    return (sum(windows) - lost_s) / (until_s - (timed[0]["time_s"] - windows[0]))
