"""Parts `layouts` and `compiled`: batches that are packed, padded or masked, and layers compiled or eager."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from functools import partial
from unittest import mock

import torch
import torch._dynamo

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import close
from benchmarks.support.workloads import Workload
from benchmarks.training.ready_steps import WARM_UP, ReadyStep, SteadySteps, packed_steps, padded_steps
from benchmarks.training.workloads import TOLERANCE, train_workloads
from trainer.config.job import JobConfig
from trainer.models.layers.compile import CACHE_VARIABLE

LAYOUTS_NOTE = (
    "Packed or padded: samples of digits are nearly equal in length, so that padding wastes little. By sample or under "
    "a mask: the same packed sequences; the model knows where samples begin, or finds it by their positions."
)
COMPILED_NOTE = (
    "Compiled: kernels that inductor makes for this processor, one thread; a GPU gains something else. Compiling is "
    "outside of these rates: it is how much longer the first steps take with nothing compiled before."
)


def layouts(bench: Bench) -> None:
    """Steps of which each micro-batch holds the same samples: packed, so that each attends to itself or under a mask
    over the whole sequence, or one to a sequence."""
    loads = train_workloads(bench)
    bench.expect(len(loads))
    for load in loads:
        of_workload(bench, load)
    bench.report.note(LAYOUTS_NOTE)


def of_workload(bench: Bench, load: Workload) -> None:
    steps = WARM_UP + (2 if bench.quick else 5)
    packed, padded = packed_steps(load, steps), padded_steps(load, steps)
    masked = [
        ReadyStep([dataclasses.replace(one, samples=None) for one in step.batches], step.useful_tokens)
        for step in packed
    ]
    steps_of = {"packed": packed, "padded": padded, "masked": masked}
    sides = {name: SteadySteps(load.cached, bench.worker, ready) for name, ready in steps_of.items()}
    found = bench.take_turns(load.name, sides, warm_up=False)
    same = all(close(sides["packed"].losses, sides[other].losses, TOLERANCE) for other in ("padded", "masked"))
    bench.report.require(same, "the loss of each step is the same for packed and padded samples, and under a mask")
    labels = {
        "packed": f"sequences of {load.cached.data.sequence_length} tokens",
        "padded": "padded to the longest of a batch",
    }
    rates = [(label, found[name]) for name, label in labels.items()]
    bench.report.compare_rates("step: packed or padded", load.name, "useful tokens", *rates)
    masks = ("by sample", found["packed"]), ("under a mask", found["masked"])
    bench.report.compare_rates("step: by sample or under a mask", load.name, "useful tokens", *masks)
    fills = [
        Side(label, [100 * sum(step.useful_tokens for step in ready) / sum(step.slots for step in ready)])
        for label, ready in zip(labels.values(), (packed, padded), strict=True)
    ]
    bench.report.compare("fill of these steps", load.name, "% of slots", *fills)


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
    torch._dynamo.reset()  # a workload before this one left its layers' code
    kernels = tempfile.mkdtemp(prefix="kernels-", dir=bench.scratch)
    with mock.patch.dict(os.environ, {CACHE_VARIABLE: kernels}):
        bench.at(f"{data}: compiling")
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


def with_compile(job: JobConfig, *, on: bool) -> JobConfig:
    train = job.train.model_copy(update={"compile": "on" if on else "off", "compile_backend": "inductor"})
    return job.model_copy(update={"train": train})
