"""Steps whose batches are made before any clock starts, and a strategy that repeats them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.support.timing import Clock, Measured
from benchmarks.support.workloads import Workload
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.dataloading.batches import ImageSource, PackedBatch, cached_images, collate, online_images
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.setup.training import build_training

WARM_UP = 2  # steps, of which the first is compiled where layers are; a later one must not be


@dataclass(frozen=True)
class ReadyStep:
    """A step's micro-batches."""

    batches: list[PackedBatch]
    useful_tokens: int

    @property
    def slots(self) -> int:
        """Tokens that are computed, padding included."""
        return sum(batch.input_ids.numel() for batch in self.batches)


class SteadySteps:
    """A strategy that has made its first WARM_UP steps; each call makes the steps after them once more."""

    def __init__(self, job: JobConfig, worker: ProcessContext, ready: Sequence[ReadyStep]) -> None:
        self.strategy = build_training(job, worker).strategy
        self.ready = ready[WARM_UP:]
        self.losses: list[float] = []
        clock = Clock()
        self._train(ready[:WARM_UP])
        self.first_s = clock.stop(1).wall_s

    def __call__(self) -> Measured:
        """Units: useful tokens."""
        clock = Clock()
        self._train(self.ready)
        return clock.stop(sum(step.useful_tokens for step in self.ready))

    def _train(self, steps: Sequence[ReadyStep]) -> None:
        for step in steps:
            label_tokens = sum(len(batch.label_ids) for batch in step.batches)
            self.losses.append(self.strategy.forward_backward(step.batches, label_tokens).item())
            self.strategy.step(1.0)


def packed_steps(load: Workload, steps: int, *, cached: bool = True) -> list[ReadyStep]:
    """The first steps as they are planned."""
    images, loader = _image_source(load, cached=cached), load.loader()
    found = []
    for micro_batches in _members(load, steps):
        packed = [[loader.pack_sequence(members) for members in micro] for micro in micro_batches]
        found.append(ReadyStep([collate(micro, images) for micro in packed], _tokens(packed)))
    return found


def padded_steps(load: Workload, steps: int, *, cached: bool = True) -> list[ReadyStep]:
    """The same samples in the same micro-batches, one to a sequence, padded to the longest."""
    images, loader = _image_source(load, cached=cached), load.loader()
    found = []
    for micro_batches in _members(load, steps):
        single = [[loader.pack_sequence([one]) for members in micro for one in members] for micro in micro_batches]
        found.append(ReadyStep([padded(micro, images) for micro in single], _tokens(single)))
    return found


def _image_source(load: Workload, *, cached: bool) -> ImageSource:
    return cached_source(load) if cached else online_images(image_preparer(load.online.model))


def cached_source(load: Workload) -> ImageSource:
    job = load.cached
    return cached_images(FeatureReader.open(job.pointers().features_uri), job.model)


def _members(load: Workload, steps: int) -> list[list[list[list[int]]]]:
    """By step, micro-batch and packed sequence: sample numbers."""
    sequence, size = load.sequence(), load.online.train.micro_batch_size
    found = []
    for step in range(steps):
        batch = sequence.batch(step)
        plan = sequence.plan(batch.epoch)
        members = [plan.members_of(number).tolist() for number in range(batch.start, batch.stop)]
        found.append([members[start : start + size] for start in range(0, len(members), size)])
    return found


def _tokens(micro_batches: list[list[PackedSequence]]) -> int:
    return sum(sequence.tokens for micro in micro_batches for sequence in micro)


def padded(sequences: Sequence[PackedSequence], images: ImageSource) -> PackedBatch:
    """Padding attends to next to nothing, as in packed sequences: the best that this layout can do."""
    length = max(each.tokens for each in sequences)
    positions = np.arange(length)
    cut = {"input_ids", "labels"}
    trimmed = [
        dataclasses.replace(each, position_ids=positions, **{name: getattr(each, name)[:length] for name in cut})
        for each in sequences
    ]
    return collate(trimmed, images)
