"""Part `compare`: how often `vlmpipe compare` takes equal models for different where questions share images."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.evaluation.significance.bootstrap import CONFIDENCE, difference_interval, resampled_sums

IMAGES = ((6, 10), (8, 10), (12, 10), (20, 10), (40, 5), (100, 3))  # images, questions of each
TOGETHER = (0.0, 0.3, 1.0)  # share of images whose questions all have one outcome
DIFFERING = 0.2  # share of questions that just one of both models answers right
DEVIATIONS = 3


def compare(bench: Bench) -> None:
    trials, chance, level = 40 if bench.quick else 300, np.random.default_rng(0), 1 - CONFIDENCE
    for images, each in IMAGES:
        for together in TOGETHER:
            bench.at(f"{images} images with {each} questions, {together:.0%} as one", 0.0)
            told, by_sample = (np.zeros(trials, bool) for _ in range(2))
            for trial in range(trials):
                drawn = chance.choice([-1, 0, 1], (images, each), p=[DIFFERING / 2, 1 - DIFFERING, DIFFERING / 2])
                as_one = chance.random(images) < together
                drawn[as_one] = drawn[as_one][:, :1]
                told[trial] = is_told(drawn)
                by_sample[trial] = is_told(drawn.reshape(-1, 1))
            found = float(told.mean())
            bench.report.require(
                found <= level + DEVIATIONS * math.sqrt(level * (1 - level) / trials),
                f"{images} x {each}: equal models are rarely told apart",
                found=f"{found:.3f}",
            )
            data = f"{images} images x {each} questions, {together:.0%} of images as one, {DIFFERING:.0%} differ"
            bench.report.figure("equal models told apart", data, "share", Side("by image", [found]))
            bench.report.figure(
                "equal models told apart", data, "share", Side("by question", [float(by_sample.mean())])
            )


def is_told(differences: np.ndarray) -> bool:
    """Whether the interval of the mean difference leaves out 0. differences: (groups, questions of each)."""
    groups = np.repeat(np.arange(len(differences)), differences.shape[1]).tolist()
    resampled = resampled_sums(groups, differences.reshape(-1, 1))[:, 0] / differences.size
    between = difference_interval(float(differences.mean()), resampled, len(differences))
    assert between
    return not between[0] <= 0 <= between[1]
