"""Our side of the training loops: `vlmpipe.trainer.loop.train` itself, with a clock round its strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.support.timing import Clock, Measured
from vlmpipe.trainer import loop
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches
from vlmpipe.trainer.distributed.process import ProcessContext, StopRequest
from vlmpipe.trainer.setup.training import TrainingSetup, build_training
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.strategies.base import StepResult, Strategy

# Batches are made ahead of use: with steps to come when the clock stops, as much is in the making as when it started.
STEPS_AFTER = 4


@dataclass(frozen=True)
class Length:
    """How long a side trains: steps before the clock starts, and steps in it."""

    warm_up: int
    steps: int

    @property
    def end(self) -> int:
        return self.warm_up + self.steps


@dataclass(frozen=True)
class Trained:
    """What one side measured over the steps in the clock, and the loss of every step up to its end."""

    measured: Measured  # units: steps, or useful tokens
    losses: list[float]
    engine_cpu_s: float = 0.0  # of the training thread, in forward, backward and optimizer
    thread_cpu_s: float = 0.0  # of the training thread in all
    collect_cpu_s: float = 0.0  # of one look for garbage, which the clock is too short for

    @property
    def outside_s(self) -> float:
        """CPU time a step that the training thread spends on all else than forward, backward and optimizer."""
        between = (self.thread_cpu_s - self.engine_cpu_s) / self.measured.units
        return between + self.collect_cpu_s / loop.COLLECT_GARBAGE_EVERY_STEPS

    @property
    def outside_share(self) -> float:
        """The same as a share of all that the thread does, in percent."""
        return 100 * self.outside_s / (self.outside_s + self.engine_cpu_s / self.measured.units)


class Enough(StopRequest):
    """Stops the loop when the clock has stopped, and leaves Ctrl-C to the benchmark."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = None


class ClockedStrategy:
    """A strategy with a clock round it. Asks the loop to stop when it has seen enough."""

    def __init__(self, strategy: Strategy, length: Length, stop: Enough) -> None:
        self._strategy, self._length, self._stop = strategy, length, stop
        self._step, self._engine_cpu_s, self._clock, self._thread_s = 0, 0.0, Clock(), 0.0
        self._losses: list[float] = []
        self.trained: Trained | None = None

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        if self._step == self._length.warm_up:
            self._engine_cpu_s, self._clock, self._thread_s = 0.0, Clock(), time.thread_time()
        if self._step == self._length.end:
            ended_s, measured = time.thread_time(), self._clock.stop(self._length.steps)
            gc.collect()
            times = (self._engine_cpu_s, ended_s - self._thread_s, time.thread_time() - ended_s)
            self.trained = Trained(measured, self._losses[:], *times)
            self._stop.requested = True
        started_s = time.thread_time()
        loss = self._strategy.forward_backward(batches, total_label_tokens)
        self._engine_cpu_s += time.thread_time() - started_s
        self._losses.append(loss.item())
        return loss

    def step(self, rate_factor: float) -> StepResult:
        started_s = time.thread_time()
        result = self._strategy.step(rate_factor)
        self._engine_cpu_s += time.thread_time() - started_s
        self._step += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def our_loop(job: JobConfig, worker: ProcessContext, length: Length) -> Trained:
    """The loop with metrics and TensorBoard; its last checkpoint comes after the clock."""
    stop = Enough()
    made: list[ClockedStrategy] = []  # by the loop, one

    def clocked_setup(job: JobConfig, worker: ProcessContext) -> TrainingSetup:
        setup = build_training(job, worker)
        made.append(ClockedStrategy(setup.strategy, length, stop))
        facts = dataclasses.replace(setup.facts, total_steps=length.end + STEPS_AFTER)
        return dataclasses.replace(setup, strategy=made[0], facts=facts)

    # A second start of the same job would continue from the first one's last checkpoint, whatever `resume` says.
    open_storage(job.run.run_uri).delete_folder("checkpoints")
    with mock.patch.object(loop, build_training.__name__, clocked_setup), contextlib.redirect_stdout(io.StringIO()):
        loop.train(job, worker, stop)
    assert made[0].trained
    return made[0].trained


def with_waits(job: JobConfig, worker: ProcessContext, length: Length) -> tuple[Trained, float]:
    """The loop, and the share of wall time in which training waited for data, in percent, by the run's own metrics.

    For so many steps that the log has some lines, as often as the run file says.
    """
    trained = our_loop(job, worker, length)
    lines = [json.loads(line) for line in open_storage(job.run.run_uri).read("metrics.jsonl").splitlines()]
    timed = [line for line in lines if line["step"] <= length.end]  # of which the first is of the first step alone
    steps = [line["step"] - before["step"] for before, line in itertools.pairwise(timed)]
    wall_s = sum(line["step_s"] * count for line, count in zip(timed[1:], steps, strict=True))
    return trained, 100 * sum(line["data_wait_s"] for line in timed[1:]) / wall_s
