"""Part `compiled`: layers compiled beside the same layers as they are."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch._dynamo

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import close
from benchmarks.support.workloads import Workload
from benchmarks.training.ready_steps import WARM_UP, SteadySteps, packed_steps
from benchmarks.training.workloads import TOLERANCE, train_workloads
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.models.layers.compile import CACHE_VARIABLE

COMPILED_NOTE = (
    "Compiled: kernels that inductor makes for this processor, one thread; a GPU gains something else. Compiling is "
    "outside of these rates: it is how much longer the first steps take with nothing compiled before."
)


def compiled(bench: Bench) -> None:
    """`train.compile` beside the same layers as they are; a wide tower runs online, where it is worth compiling."""
    loads = train_workloads(bench)
    bench.expect(len(loads))
    for load in loads:
        compiled_or_eager(bench, load, cached="tower" not in load.name)
    bench.report.note(COMPILED_NOTE)


def compiled_or_eager(bench: Bench, load: Workload, *, cached: bool) -> None:
    """The same steps, over batches that are ready; both sides stay as they are from round to round."""
    job = load.cached if cached else load.online
    ready = packed_steps(load, WARM_UP + (2 if bench.quick else 5), cached=cached)
    data = f"{load.name}, {'cached features' if cached else 'tower online'}"
    with compiling_anew(bench, data):
        side = partial(SteadySteps, worker=bench.worker, ready=ready)
        sides = {"compiled": side(with_compile(job, on=True)), "eager": side(with_compile(job, on=False))}
        found = bench.take_turns(data, sides, warm_up=False)
    law = f"compiled layers give the loss of every step (relative {TOLERANCE:g})"
    same = close(sides["compiled"].losses, sides["eager"].losses, TOLERANCE)
    bench.report.require(same, law, found=data)
    pair = ("train.compile", found["compiled"]), ("eager", found["eager"])
    bench.report.compare_rates("step: compiled or eager", data, "useful tokens", *pair)
    longer_s = sides["compiled"].first_s - sides["eager"].first_s
    bench.report.figure("time to compile", data, "s of wall time", Side("train.compile, inductor", [longer_s]))
    walls = [[each.wall_per_unit for each in found[name]] for name in ("eager", "compiled")]
    saved = 1 - statistics.median(compiled / eager for eager, compiled in zip(*walls, strict=True))
    if saved > 0:
        after = Side("train.compile, inductor", [longer_s / saved])
        bench.report.figure("compiling has paid back", data, "s of eager training", after)
    else:
        bench.report.note(f"{data}: compiled steps took no less time in this run: compiling never pays back.")


def with_compile(job: JobConfig, *, on: bool) -> JobConfig:
    train = job.train.model_copy(update={"compile": "on" if on else "off", "compile_backend": "inductor"})
    return job.model_copy(update={"train": train})


@contextmanager
def compiling_anew(bench: Bench, data: str) -> Iterator[None]:
    """Compile with no kernel kept from before."""
    torch._dynamo.reset()  # a workload before this one left its layers' code
    kernels = tempfile.mkdtemp(prefix="kernels-", dir=bench.scratch)
    with mock.patch.dict(os.environ, {CACHE_VARIABLE: kernels}):
        bench.at(f"{data}: compiling")
        yield
