"""Part `layouts`: batches that are packed, padded or masked."""

from __future__ import annotations

import dataclasses

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import close
from benchmarks.support.workloads import Workload
from benchmarks.training.ready_steps import WARM_UP, ReadyStep, SteadySteps, packed_steps, padded_steps
from benchmarks.training.workloads import TOLERANCE, train_workloads

LAYOUTS_NOTE = (
    "Packed or padded: samples of digits are nearly equal in length, so that padding wastes little. By sample or under "
    "a mask: the same packed sequences; the model knows where samples begin, or finds it by their positions."
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
