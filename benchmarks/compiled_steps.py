"""Layers compiled by inductor (`train.compile`) beside the same layers as they are, in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo

from benchmarks.common import Clock, Measured, close, interleaved
from benchmarks.report import Report, Side
from benchmarks.training_sides import ReadyStep, ready_steps
from benchmarks.workloads import Workload
from trainer.config.job import JobConfig
from trainer.dataloading.batches import ImageSource, cached_images, online_images
from trainer.distributed.process import ProcessContext
from trainer.feature_cache.reader import FeatureReader
from trainer.models.image_processor import image_preparer
from trainer.models.layers.compile import CACHE_VARIABLE
from trainer.models.registry import family_of
from trainer.setup import build_training

TOLERANCE = 1e-4  # relative: fused kernels round elsewhere (tests/integration/trainer/models/test_compile.py)
WARM_UP = 2  # steps, of which the first is compiled; a later one must not be
NOTE = (
    "Compiled: kernels that inductor makes for this processor, one thread. What it gains on a GPU is another figure. "
    "Compiling is outside of these rates; it is how much longer the first steps take with nothing compiled before."
)


def compiled_or_eager(
    report: Report, load: Workload, worker: ProcessContext, scratch: Path, rounds: int, steps: int, *, cached: bool
) -> None:
    """The same steps, over batches that are ready; both sides stay as they are from round to round."""
    job, images = (load.cached, _features(load.cached)) if cached else (load.online, _pixels(load.online))
    ready, _ = ready_steps(load, images, WARM_UP + steps)
    data = f"{load.name}, {'cached features' if cached else 'tower online'}"
    torch._dynamo.reset()  # a workload before this one left its layers' code
    with mock.patch.dict(os.environ, {CACHE_VARIABLE: tempfile.mkdtemp(prefix="kernels-", dir=scratch)}):
        compiled, eager = (SteadySteps(with_compile(job, on=on), worker, ready) for on in (True, False))
        found = interleaved({"compiled": compiled, "eager": eager}, rounds, warm_up=False)
    law = f"compiled layers give the loss of every step (relative {TOLERANCE:g})"
    report.require(close(compiled.losses, eager.losses, TOLERANCE), law, found=data)
    sides = (("train.compile", found["compiled"]), ("eager", found["eager"]))
    report.compare_rates("step: compiled or eager", data, "useful tokens", *sides)
    longer_s = compiled.first_s - eager.first_s
    report.figure("time to compile", data, "s of wall time", Side("train.compile, inductor", [longer_s]))


def with_compile(job: JobConfig, *, on: bool) -> JobConfig:
    train = job.train.model_copy(update={"compile": on, "compile_backend": "inductor"})
    return job.model_copy(update={"train": train})


class SteadySteps:
    """A strategy that has made its first steps; each call makes the steps behind them once more."""

    def __init__(self, job: JobConfig, worker: ProcessContext, ready: Sequence[ReadyStep]) -> None:
        self._strategy = build_training(job, worker).strategy
        self._ready = ready[WARM_UP:]
        self.losses: list[float] = []
        clock = Clock()
        self._train(ready[:WARM_UP])
        self.first_s = clock.stop(1).wall_s

    def __call__(self) -> Measured:
        clock = Clock()
        self._train(self._ready)
        return clock.stop(sum(step.useful_tokens for step in self._ready))

    def _train(self, steps: Sequence[ReadyStep]) -> None:
        for step in steps:
            label_tokens = sum(len(batch.label_ids) for batch in step.batches)
            self.losses.append(self._strategy.forward_backward(step.batches, label_tokens).item())
            self._strategy.step(1.0)


def _features(job: JobConfig) -> ImageSource:
    return cached_images(FeatureReader.open(job.pointers().features_uri), family_of(job.model).feature_shape(job.model))


def _pixels(job: JobConfig) -> ImageSource:
    return online_images(image_preparer(job.model))
