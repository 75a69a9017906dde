"""Parts `stall`, `overhead` and `mirror`: how long a save holds training up, and what saves and copies add to a run."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

from benchmarks.checkpoint.stacked_layers import RECORD, WIDTH, Trained
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import timed_s
from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror
from vlmpipe.trainer.checkpoint.mirror.copies import newest_good_of
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.storage.local import LocalStorage

MIB = 2**20
STALL_LAYERS, RUN_LAYERS = 24, 6
STEP_S = 0.2  # a step of the run whose overhead is measured


def stall(bench: Bench) -> None:
    """How long training stands still for a save, beside a save that waits for its COMMIT."""
    layers = 4 if bench.quick else STALL_LAYERS
    trained = Trained(layers, bench.scratch / "stall", bench.worker)
    steps = itertools.count(1)

    def save(saver: CheckpointSaver) -> Callable[[], float]:
        def timed() -> float:
            record = dataclasses.replace(RECORD, step=next(steps))
            stalled_s = timed_s(lambda: saver.save(record))()
            saver.finish()
            return stalled_s

        return timed

    sides = {"async": save(trained.saver(async_save=True)), "sync": save(trained.saver(async_save=False))}
    found = bench.take_turns("stall of a save", sides)
    data = f"{3 * layers * WIDTH * WIDTH * 4 / MIB:.0f} MiB of state"
    bench.report.require(newest_good_of([trained.store])[1] is not None, "the last save verifies")
    mine = Side("saved in the background", [1 / seconds for seconds in found["async"]])
    other = Side("saved while training waits", [1 / seconds for seconds in found["sync"]])
    bench.report.compare("stall of a save", data, "1 / s", mine, other)
    shares = [100 * a / b for a, b in zip(found["async"], found["sync"], strict=True)]
    bench.report.figure("stall as a share of a waiting save", data, "%", Side("stall", shares))


def overhead(bench: Bench) -> None:
    """A run that saves every 100 steps, once here, beside the same run that never saves."""
    steps = 20 if bench.quick else 100
    trained = Trained(RUN_LAYERS, bench.scratch / "run", bench.worker)
    saver, numbers = trained.saver(async_save=True), itertools.count(1)
    sides = {
        "saves": timed_s(_run(trained, saver, numbers, steps, save_every=steps)),
        "never": timed_s(_run(trained, saver, numbers, steps, save_every=0)),
    }
    found = bench.take_turns("a run with saves and one without", sides, rounds=min(bench.rounds, 3), warm_up=False)
    shares = [100 * (a / b - 1) for a, b in zip(found["saves"], found["never"], strict=True)]
    data = f"{steps} steps of {1000 * STEP_S:.0f} ms, a save every {steps}"
    bench.report.figure("overhead of a run", data, "%", Side("more wall time than without saves", shares))


def mirror(bench: Bench) -> None:
    """A run whose checkpoints are mirrored in the background, beside the same run without a mirror."""
    steps = 20 if bench.quick else 60
    trained = Trained(RUN_LAYERS, bench.scratch / "mirrored", bench.worker)
    numbers, second = itertools.count(1), LocalStorage(bench.scratch / "mirror")
    copies = BackgroundMirror(trained.store, second, Retention(1), copied_step=0)
    mirrored, plain = trained.saver(async_save=True, on_commit=copies.submit), trained.saver(async_save=True)
    sides = {
        "mirrored": timed_s(_run(trained, mirrored, numbers, steps, save_every=20)),
        "plain": timed_s(_run(trained, plain, numbers, steps, save_every=20)),
    }
    found = bench.take_turns("a run with a mirror and one without", sides, rounds=bench.rounds, warm_up=False)
    data = f"{steps} steps of {1000 * STEP_S:.0f} ms, a save every 20"
    bench.report.require(bool(committed(second)), "checkpoints reach the mirror")
    bench.report.compare(
        "steps with a mirror",
        data,
        "steps / s",
        Side("mirrored", [steps / seconds for seconds in found["mirrored"]]),
        Side("not mirrored", [steps / seconds for seconds in found["plain"]]),
    )


def _run(
    trained: Trained, saver: CheckpointSaver, numbers: Iterator[int], steps: int, *, save_every: int
) -> Callable[[], None]:
    """A run of steps of a known length, as on a device that computes. 0 never saves."""

    def steps_of_a_run() -> None:
        for step in range(1, steps + 1):
            step_ends = time.perf_counter() + STEP_S
            trained.step()
            while time.perf_counter() < step_ends:
                time.sleep(0.001)
            # Halfway: at the end a run would wait for its last save.
            if save_every and step % save_every == save_every // 2:
                saver.save(dataclasses.replace(RECORD, step=next(numbers)))
        saver.finish()

    return steps_of_a_run
