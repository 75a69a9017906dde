"""Part `slices`: how often a value of a field is called worse or better, where it is not, and where it is."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.evaluation.significance.slices import holm, p_of_slice
from vlmpipe.trainer.evaluation.validation.field_slices import LEVEL

DATA = ((40, 1), (40, 6), (200, 1), (200, 6), (1000, 1))  # images, questions of each
VALUES = 5  # of the field, as many images each on average
DROP = 0.2  # of the share of right answers, which is 0.75 on average, for one value
DEVIATIONS = 3


def slices(bench: Bench) -> None:
    trials, chance = 40 if bench.quick else 500, np.random.default_rng(0)
    for images, each in DATA:
        bench.at(f"{images} images with {each} questions", 0.0)
        equal = [tested(chance, images, each, 0.0) for _ in range(trials)]
        lower = [tested(chance, images, each, DROP) for _ in range(trials)]
        rates = {
            "an equal value, one test": share([alone[0] < LEVEL for alone, _ in equal]),
            "any of five equal values, corrected": share([min(corrected) < LEVEL for _, corrected in equal]),
            "a value that is 20 points lower, corrected": share([corrected[0] < LEVEL for _, corrected in lower]),
        }
        for name in list(rates)[:2]:
            bench.report.require(
                rates[name] <= LEVEL + DEVIATIONS * math.sqrt(LEVEL * (1 - LEVEL) / trials),
                f"{images} x {each}: {name} is rarely told apart",
                found=f"{rates[name]:.3f}",
            )
        data = f"{images} images x {each} questions, {VALUES} values"
        for name, rate in rates.items():
            bench.report.figure("slices told apart", data, "share", Side(name, [rate]))


def tested(chance: np.random.Generator, images: int, each: int, drop: float) -> tuple[list[float], list[float]]:
    """p values of all values of a field, the one that is lower by `drop` first, and corrected. Images differ in how
    hard they are (beta 3, 1). 1 for one about too few images.
    """
    ease, value = chance.beta(3, 1, images), chance.integers(0, VALUES, images)
    ease[value == 0] *= 1 - drop / 0.75
    right = (chance.random((images, each)) < ease[:, None]).reshape(-1).tolist()
    groups, values = np.repeat(np.arange(images), each).tolist(), np.repeat(value, each)
    found = {number: p_of_slice(groups, right, (values == number).tolist()) for number in range(VALUES)}
    alone = {number: p for number, p in found.items() if p is not None}
    corrected = holm(alone)
    return [alone.get(number, 1.0) for number in range(VALUES)], [
        corrected.get(number, 1.0) for number in range(VALUES)
    ]


def share(told: list[bool]) -> float:
    return sum(told) / len(told)
