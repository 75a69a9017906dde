"""Write the learning curve of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from vlmpipe.comparison.curve.curve import curve_of
from vlmpipe.comparison.sweep.results import HOUR_S, Training, read_results
from vlmpipe.records.learning_curve import LearningCurve, TrainingCost
from vlmpipe.records.plan import PlannedRun
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.mixture import share_size
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.sweep import Sweep
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage


def write_curve(run_uri: str) -> LearningCurve | None:
    """Write curve.json of a sweep over shares of the samples; None for another sweep.

    Raises DataError where no training is done, as the comparison does before.
    """
    store, results = open_storage(run_uri), read_results(run_uri)
    if not results.sweep.shares:
        return None
    samples = _samples(results.sweep)
    first = JobConfig.load(f"{results.trainings[0].run_uri}/run.json")
    curve = curve_of(results, samples, first.train.epochs, _cost(store, results.trainings, samples))
    curve = curve.model_copy(update={"max_steps": first.train.max_steps})
    curve.write(store)
    return curve


def _samples(sweep: Sweep) -> dict[str, float]:
    """Training samples of each share, the mean of its starts: a share ends with a whole group of images."""
    written = (DataPointers.read_if_there(open_storage(training.features_from)) for training in sweep.trainings)
    pointers = next(filter(None, written))  # a training is done, and all have the same data
    split, sizes = Index.load(pointers.prepared_uri).split("train"), dict[str, list[int]]()
    for training in sweep.trainings:
        job = JobConfig.load(f"{training.run_uri}/run.json")
        sizes.setdefault(training.variant, []).append(share_size(split, job.data, job.train.seed))
    return {name: fmean(of_starts) for name, of_starts in sizes.items()}


def _cost(store: Storage, trainings: Sequence[Training], samples: Mapping[str, float]) -> TrainingCost | None:
    """Measured hours by samples, at the price of the plan; None where fewer than two shares were timed."""
    timed = [(samples[done.variant], done.train_s / HOUR_S) for done in trainings if done.is_done and done.train_s]
    if len({number for number, _ in timed}) < 2:
        return None
    numbers, hours = np.array(timed).T
    per_sample, fixed = np.polyfit(numbers, hours, 1)
    if fixed < 0 or per_sample < 0:  # times are too few or too noisy to tell the start from the steps
        per_sample, fixed = max(0.0, float(hours @ numbers / (numbers @ numbers))), 0.0
    plan = PlannedRun.read_if_there(store)
    steps = plan.cost.steps if plan and plan.cost else ()
    price = next((step.usd_per_hour for step in steps if step.job == "train"), None)
    return TrainingCost(fixed_hours=float(fixed), per_sample_hours=float(per_sample), usd_per_hour=price)
