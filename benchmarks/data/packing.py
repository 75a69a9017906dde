"""Part `packing`: how full packed sequences are, and what planning an epoch of them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured
from benchmarks.support.workloads import Workload, data_workloads
from vlmpipe.trainer.data.packing import Int64Array, PackingPlan, plan_packing

PADDED_BATCH = 8  # samples that are padded to the longest among them
GREEDY_WINDOW = 1024  # samples, as many as best fit looks at at once


@dataclass(frozen=True)
class Lengths:
    """What packing depends on."""

    tokens: Int64Array  # (samples,)
    images: Int64Array  # (samples,)
    sequence_length: int
    max_images_per_sequence: int


def packing(bench: Bench) -> None:
    """The shipped data sets, and a mix of lengths as vision-language sets have them."""
    sets = {load.name: lengths_of(load) for load in data_workloads(bench)}
    sets["synthetic VLM mix"] = synthetic_lengths(1000 if bench.quick else 6000)
    bench.expect(len(sets))
    for name, lengths in sets.items():
        compare(bench, name, lengths)


def lengths_of(load: Workload) -> Lengths:
    split, data = load.split(), load.online.data
    tokens, images = split.tokens.astype(np.int64), split.image_count.astype(np.int64)
    return Lengths(tokens, images, data.sequence_length, data.max_images_per_sequence)


def synthetic_lengths(samples: int) -> Lengths:
    """Lengths as in a mix of vision-language sets: 1 to 3 images of five sizes, and text of log-normal length."""
    random = np.random.default_rng(0)
    images = random.integers(1, 4, samples)
    sizes = random.choice([144, 256, 400, 576, 1024], (samples, 3))
    image_tokens = np.where(np.arange(3) < images[:, None], sizes, 0).sum(1)
    text = np.clip(random.lognormal(np.log(120), 0.8, samples), 10, 1000).astype(np.int64)
    return Lengths(image_tokens + text, images, sequence_length=4096, max_images_per_sequence=18)


def compare(bench: Bench, name: str, lengths: Lengths) -> None:
    """Fill is useful tokens over slots computed: a ratio of fills is the other way round a ratio of slots."""
    report, useful = bench.report, int(lengths.tokens.sum())

    length, samples = lengths.sequence_length, len(lengths.tokens)
    once_each = sorted(planned(lengths, 0).members) == list(range(samples))
    report.require(once_each, "every sample is in exactly one packed sequence")

    def pack(side: str) -> Measured:
        """The next epoch of a side. Units: samples."""
        order = np.random.default_rng(len(slots[side])).permutation(samples)
        clock = Clock()
        slots[side].append(packers[side](order, len(slots[side])))
        return clock.stop(samples)

    packers: dict[str, Callable[[Int64Array, int], int]] = {  # an epoch's samples in a random order, its number: slots
        "best fit": lambda _order, epoch: length * len(planned(lengths, epoch)),
        "padded": lambda order, _epoch: padded_slots(order, lengths, PADDED_BATCH),
        "first come": lambda order, _epoch: length * first_come(order, lengths),
        "first fit": lambda order, _epoch: length * first_fit(order, lengths, GREEDY_WINDOW),
    }
    slots: dict[str, list[int]] = {side: [] for side in packers}
    found = bench.take_turns(name, {side: partial(pack, side) for side in packers}, warm_up=False)
    fills = {side: [100 * useful / count for count in counts] for side, counts in slots.items()}
    ours = Side(f"sequences of {length} tokens, best fit", fills["best fit"])
    greedy = f"first fit of {GREEDY_WINDOW}"
    for claim, other, label in (
        ("fill: packed or padded", "padded", f"padded to the longest of {PADDED_BATCH}"),
        ("fill: best fit or first come", "first come", "first come, first served"),
        ("fill: best fit or first fit", "first fit", greedy),
    ):
        report.compare(claim, name, "% of slots", ours, Side(label, fills[other]))
    plan_us = [1e6 * each.cpu_per_unit for each in found["best fit"]]
    report.figure("time to plan an epoch", name, "CPU us / sample", Side("plan_packing", plan_us))
    sides_of = ("shuffled, best fit", found["best fit"]), (greedy, found["first fit"])
    report.compare_rates("samples planned", name, "samples", *sides_of)


def planned(lengths: Lengths, epoch: int) -> PackingPlan:
    return plan_packing(
        lengths.tokens,
        lengths.images,
        sequence_length=lengths.sequence_length,
        max_images_per_sequence=lengths.max_images_per_sequence,
        seed=0,
        epoch=epoch,
    )


def padded_slots(order: Int64Array, lengths: Lengths, batch: int) -> int:
    """Tokens computed when the samples of each batch are padded to the longest among them."""
    tokens = lengths.tokens[order]
    batches = [tokens[start : start + batch] for start in range(0, len(tokens), batch)]
    return sum(len(padded) * int(padded.max()) for padded in batches)


def first_come(order: Int64Array, lengths: Lengths) -> int:
    """Sequences that a stream fills: one is closed as soon as the next sample does not fit."""
    sequences, free_tokens, free_images = 0, 0, 0
    for tokens, images in zip(lengths.tokens[order].tolist(), lengths.images[order].tolist(), strict=True):
        if tokens > free_tokens or images > free_images:
            sequences += 1
            free_tokens, free_images = lengths.sequence_length, lengths.max_images_per_sequence
        free_tokens, free_images = free_tokens - tokens, free_images - images
    return sequences


def first_fit(order: Int64Array, lengths: Lengths, window: int) -> int:
    """Sequences of greedy packing: samples in the order they come, each into the first of its window with room."""
    total = 0
    tokens, images = lengths.tokens[order].tolist(), lengths.images[order].tolist()
    for start in range(0, len(order), window):
        free: list[list[int]] = []  # tokens and images of each sequence
        for size, count in zip(tokens[start : start + window], images[start : start + window], strict=True):
            found = next((each for each in free if each[0] >= size and each[1] >= count), None)
            if found is None:
                found = [lengths.sequence_length, lengths.max_images_per_sequence]
                free.append(found)
            found[0] -= size
            found[1] -= count
        total += len(free)
    return total
