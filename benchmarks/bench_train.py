"""What the training step gains or costs: cached features, packing, our loop beside Hugging Face's and beside a plain
one, compiled layers, strategies beside ddp, features of training beside none. `make bench-train`"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import attention_sides
from benchmarks.attention_sides import by_sample_or_under_a_mask
from benchmarks.common import Measured, close, interleaved, options
from benchmarks.compiled_steps import NOTE, compiled_or_eager
from benchmarks.hugging_face import hugging_face_trainer
from benchmarks.plain_loop import plain_loop
from benchmarks.report import Report, Side
from benchmarks.strategy_sides import beside_their_baselines
from benchmarks.training_sides import Length, Trained, bare_steps, our_loop, ready_steps, some_lines
from benchmarks.workloads import Workload, workload
from trainer.dataloading.batches import cached_images
from trainer.distributed.process import ProcessContext, start_worker
from trainer.feature_cache.reader import FeatureReader
from trainer.models.registry import family_of
from trainer.setup import mean_sequence_flops

TOLERANCE = 1e-4  # relative, of losses in fp32; sums in another order differ by less
LINES_STEPS, LINES_ROUNDS = 20, 3  # more steps than rows are read ahead of, and those of one line of the log at least
OUTSIDE = "outside forward, backward, optimizer"
QUICK = {"digits": ("digits", ("train.global_batch_size=4", "train.micro_batch_size=2", "data.max_samples=600"))}
WIDE_TOWER = ("hidden_size=256", "intermediate_size=1024", "num_hidden_layers=6")  # a fifth of an online step
FULL = {
    "digits": ("digits", ()),
    "easy-vqa": ("easy-vqa", ("data.max_samples=800",)),
    "easy-vqa, wide tower": (
        "easy-vqa",
        ("data.max_samples=800", *[f"model.tower.config.{setting}" for setting in WIDE_TOWER]),
    ),
}
COMPILED_ONLINE = {"easy-vqa, wide tower"}  # where a tower is worth compiling; the others take cached features
LAYOUTS_NOTE = (
    "Packed or padded: samples of digits are nearly equal in length, so that padding wastes little. By sample or under "
    "a mask: the same packed rows, of which the model is told where samples begin, or has to see it by their positions."
)
PARTS = ("loops", "layouts", "attention", "compiled", "strategies", "features")
ON_WORKLOADS = {"loops", "layouts", "compiled"}


def main() -> None:
    chosen = options(__doc__, PARTS)
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    length = Length(warm_up=1, steps=2) if chosen.quick else Length(warm_up=2, steps=5)
    report = Report("Training step", {"rounds": rounds, "steps a round": length.steps, "warm-up steps": length.warm_up})
    if ON_WORKLOADS & set(chosen.only):
        worker = start_worker()
        with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
            for name, (run_file, overrides) in (QUICK if chosen.quick else FULL).items():
                load = workload(run_file, Path(scratch), worker, overrides, name=name)
                of_workload(report, load, worker, length, rounds, Path(scratch), chosen.only)
    if "attention" in chosen.only:
        by_sample_or_under_a_mask(report, attention_sides.QUICK if chosen.quick else attention_sides.FULL, rounds)
    if "compiled" in chosen.only:
        report.notes.append(NOTE)
    for part in ("strategies", "features"):
        if part in chosen.only:
            beside_their_baselines(report, part, rounds, quick=chosen.quick)
    report.publish(chosen)


def of_workload(
    report: Report,
    load: Workload,
    worker: ProcessContext,
    length: Length,
    rounds: int,
    scratch: Path,
    parts: Collection[str],
) -> None:
    """The parts that train on a shipped run file's data, in this process."""
    if "loops" in parts:
        loops(report, load, worker, length, rounds, scratch)
    if "layouts" in parts:
        layouts(report, load, worker, length.steps, rounds)
    if "compiled" in parts:
        online = load.name in COMPILED_ONLINE
        compiled_or_eager(report, load, worker, scratch, rounds, length.steps, cached=not online)


def loops(report: Report, load: Workload, worker: ProcessContext, length: Length, rounds: int, scratch: Path) -> None:
    """Whole training loops on the same rows: reading, collating, the step, metrics."""
    sides = {
        "cached": partial(our_loop, load.cached, worker, length),
        "online": partial(our_loop, load.online, worker, length),
        "trainer": partial(hugging_face_trainer, load, length, scratch / "trainer"),
        "plain": partial(plain_loop, load, length),
    }
    found = interleaved(sides, rounds, warm_up=False)
    cached, online, trainer, plain = (found[name] for name in sides)
    report.require(same_losses(cached, online), "the loss of every step is the same with cached and online features")
    report.require(same_losses(online, trainer), "the loss of every step is the same in our loop and in the HF Trainer")
    report.require(same_losses(cached, plain), "the loss of every step is the same in our loop and in a plain one")
    ours_online = ("our loop, online features", measured(online))
    ours_cached = ("our loop, cached features", measured(cached))
    theirs = ("HF Trainer, online features", measured(trainer))
    report.compare_rates("step: cached or online", load.name, "steps", ours_cached, ours_online)
    report.compare_rates("step: ours or HF Trainer", load.name, "steps", ours_online, theirs)
    report.compare_rates("step: ours cached or HF Trainer", load.name, "steps", ours_cached, theirs)
    tokens = plain[0].measured.units  # the same steps, so the same tokens
    in_tokens = ("our loop, cached features", [replace(one, units=tokens) for one in measured(cached)])
    by_hand = ("plain loop, cached features", measured(plain))
    report.compare_rates("step: ours or a plain loop", load.name, "useful tokens", in_tokens, by_hand)
    rates = [
        online_round.engine_cpu_s / cached_round.engine_cpu_s
        for cached_round, online_round in zip(cached, online, strict=True)
    ]
    gain = Side("CPU time of forward, backward and optimizer, online over cached", rates)
    planned = Side("the planner's FLOPs of a row, online over cached", [planned_gain(load)] * len(rates))
    report.compare("gain of cached features: measured or planned", load.name, "x", gain, planned)
    for label, side in (("our loop, cached features", cached), ("our loop, online features", online)):
        shares = [100 * (1 - each.engine_cpu_s / each.measured.cpu_s) for each in side]
        report.figure(f"{OUTSIDE}: all threads", load.name, "% of CPU time", Side(label, shares))
    long = Length(length.warm_up, LINES_STEPS)
    for label, job in (("our loop, cached features", load.cached), ("our loop, online features", load.online)):
        runs, waits = zip(*(some_lines(job, worker, long) for _ in range(min(rounds, LINES_ROUNDS))), strict=True)
        thread, times_ms = f"{OUTSIDE}: training thread", [1000 * run.outside_s for run in runs]
        report.figure(thread, load.name, "% of its CPU time", Side(label, [run.outside_share for run in runs]))
        report.figure(thread, load.name, "ms a step", Side(label, times_ms))
        report.figure("training waits for data", load.name, "% of wall time", Side(label, waits))


def planned_gain(load: Workload) -> float:
    """What the planner says of these rows: it counts FLOPs, and takes all of them as equally fast."""
    job, split, sequence = load.cached, load.split(), load.sequence()
    shape = family_of(job.model).shape(job.model)
    online, cached = (mean_sequence_flops(job, shape, split, sequence, cached=is_cached) for is_cached in (False, True))
    return online.total / cached.total


def layouts(report: Report, load: Workload, worker: ProcessContext, steps: int, rounds: int) -> None:
    """Steps of which each micro-batch holds the same samples: packed, so that each attends to itself or under a mask
    over all of a row, or one to a row."""
    shape = family_of(load.cached.model).feature_shape(load.cached.model)
    reader = FeatureReader.open(load.cached.pointers().features_uri)
    packed, padded = ready_steps(load, cached_images(reader, shape), steps + 1)
    masked = [
        dataclasses.replace(step, batches=[dataclasses.replace(batch, samples=None) for batch in step.batches])
        for step in packed
    ]
    steps_of = {"packed": packed, "padded": padded, "masked": masked}
    sides = {name: partial(bare_steps, load.cached, worker, ready) for name, ready in steps_of.items()}
    found = interleaved(sides, rounds, warm_up=False)
    same = all(same_losses(found["packed"], found[other]) for other in ("padded", "masked"))
    report.require(same, "the loss of each step is the same for packed and padded samples, and under a mask")
    labels = {
        "packed": f"rows of {load.cached.data.sequence_length} tokens",
        "padded": "padded to the longest of a batch",
    }
    rates = [(label, measured(found[name])) for name, label in labels.items()]
    report.compare_rates("step: packed or padded", load.name, "useful tokens", *rates)
    masks = [("by sample", measured(found["packed"])), ("under a mask", measured(found["masked"]))]
    report.compare_rates("step: by sample or under a mask", load.name, "useful tokens", *masks)
    fills = [
        Side(label, [100 * sum(step.useful_tokens for step in ready) / sum(step.slots for step in ready)])
        for label, ready in zip(labels.values(), (packed, padded), strict=True)
    ]
    report.compare("fill of these steps", load.name, "% of slots", *fills)
    if LAYOUTS_NOTE not in report.notes:
        report.notes.append(LAYOUTS_NOTE)


def measured(side: list[Trained]) -> list[Measured]:
    return [trained.measured for trained in side]


def same_losses(left: list[Trained], right: list[Trained]) -> bool:
    """Whether both sides had the same loss at every step of every round."""
    return all(close(one.losses, other.losses, TOLERANCE) for one, other in zip(left, right, strict=True))


if __name__ == "__main__":
    main()
