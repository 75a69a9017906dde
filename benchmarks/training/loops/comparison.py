"""Part `loops`: whole training loops on the same packed sequences: reading, collating, the step, metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Measured, close
from benchmarks.support.workloads import Workload
from benchmarks.training.loops.hugging_face import hugging_face_trainer
from benchmarks.training.loops.our_loop import Length, Trained, our_loop, with_waits
from benchmarks.training.loops.plain_loop import plain_loop
from benchmarks.training.workloads import TOLERANCE, train_workloads
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.data import mean_sequence_flops

LONG_STEPS, LONG_ROUNDS = 20, 3  # more steps than are read ahead of, and than a line of the log has
OUTSIDE = "outside forward, backward, optimizer"
CACHED, ONLINE = "our loop, cached features", "our loop, online features"


def loops(bench: Bench) -> None:
    """Ours with cached and with online features, Hugging Face's Trainer and a plain loop."""
    loads = train_workloads(bench)
    bench.expect(len(loads) + 1)
    length = Length(warm_up=1, steps=2) if bench.quick else Length(warm_up=1, steps=4)
    for load in loads:
        side_by_side(bench, load, length)
    outside_of_steps(bench, loads[0], Length(length.warm_up, LONG_STEPS))


def side_by_side(bench: Bench, load: Workload, length: Length) -> None:
    report = bench.report
    sides = {
        "cached": partial(our_loop, load.cached, bench.worker, length),
        "online": partial(our_loop, load.online, bench.worker, length),
        "trainer": partial(hugging_face_trainer, load, length, bench.scratch / "trainer"),
        "plain": partial(plain_loop, load, length),
    }
    found = bench.take_turns(load.name, sides, warm_up=False)
    cached, online, trainer, plain = (found[name] for name in sides)
    report.require(same_losses(cached, online), "the loss of every step is the same with cached and online features")
    report.require(same_losses(online, trainer), "the loss of every step is the same in our loop and in the HF Trainer")
    report.require(same_losses(cached, plain), "the loss of every step is the same in our loop and in a plain one")
    ours_online, ours_cached = (ONLINE, measured(online)), (CACHED, measured(cached))
    theirs = ("HF Trainer, online features", measured(trainer))
    report.compare_rates("step: cached or online", load.name, "steps", ours_cached, ours_online)
    report.compare_rates("step: ours or HF Trainer", load.name, "steps", ours_online, theirs)
    report.compare_rates("step: ours cached or HF Trainer", load.name, "steps", ours_cached, theirs)
    tokens = plain[0].measured.units  # the same steps, so the same tokens
    in_tokens = (CACHED, [replace(one, units=tokens) for one in measured(cached)])
    by_hand = ("plain loop, cached features", measured(plain))
    report.compare_rates("step: ours or a plain loop", load.name, "useful tokens", in_tokens, by_hand)
    rates = [slow.engine_cpu_s / fast.engine_cpu_s for fast, slow in zip(cached, online, strict=True)]
    gain = Side("CPU time of forward, backward and optimizer, online over cached", rates)
    planned = Side("the planner's FLOPs of a sequence, online over cached", [planned_gain(load)] * len(rates))
    report.compare("gain of cached features: measured or planned", load.name, "x", gain, planned)
    for label, side in ((CACHED, cached), (ONLINE, online)):
        shares = [100 * (1 - each.engine_cpu_s / each.measured.cpu_s) for each in side]
        report.figure(f"{OUTSIDE}: all threads", load.name, "% of CPU time", Side(label, shares))


def outside_of_steps(bench: Bench, load: Workload, length: Length) -> None:
    """What the loop adds to a step: in ms it does not grow with the model, so the smallest model shows it best."""
    jobs = {CACHED: load.cached, ONLINE: load.online}
    sides = {label: partial(with_waits, job, bench.worker, length) for label, job in jobs.items()}
    found = bench.take_turns(f"{load.name}, {LONG_STEPS} steps", sides, rounds=LONG_ROUNDS, warm_up=False)
    for label, rounds in found.items():
        runs, waits = [run for run, _ in rounds], [wait for _, wait in rounds]
        claim = f"{OUTSIDE}: training thread"
        shares, times_ms = [run.outside_share for run in runs], [1000 * run.outside_s for run in runs]
        bench.report.figure(claim, load.name, "% of its CPU time", Side(label, shares))
        bench.report.figure(claim, load.name, "ms a step", Side(label, times_ms))
        bench.report.figure("training waits for data", load.name, "% of wall time", Side(label, waits))


def planned_gain(load: Workload) -> float:
    """What the planner says of this data: it counts FLOPs, and takes all of them as equally fast."""
    job, sequence = load.cached, load.sequence()
    shape = family_of(job.model).shape(job.model)
    online, cached = (mean_sequence_flops(job, shape, sequence, cached=is_cached) for is_cached in (False, True))
    return online.total / cached.total


def measured(side: list[Trained]) -> list[Measured]:
    return [trained.measured for trained in side]


def same_losses(left: list[Trained], right: list[Trained]) -> bool:
    """Whether both sides had the same loss at every step of every round."""
    return all(close(one.losses, other.losses, TOLERANCE) for one, other in zip(left, right, strict=True))
