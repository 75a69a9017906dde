"""How often a learning curve's interval holds the truth, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.comparison.curve.curve import Points, fitted_laws, hidden, points_of, predicted
from vlmpipe.comparison.sweep.results import Training

SHARES, SAMPLES, QUESTIONS = (0.05, 0.1, 0.2, 0.4, 1.0), 2000, 300
SPREAD = 0.01  # standard deviation between the true scores of starts
LAWS: dict[str, Callable[[float], float]] = {  # error of a number of samples
    "floor 0.05, exponent 0.5": lambda samples: 0.05 + 0.5 * (samples / 100) ** -0.5,
    "floor 0.1, exponent 1": lambda samples: 0.1 + 0.6 * (samples / 100) ** -1.0,
    "floor 0, exponent 0.3": lambda samples: 0.6 * (samples / 100) ** -0.3,
    "floor 0.1, logistic, exponent 1.5": lambda samples: 0.1 + 0.7 / (1 + (samples / 200) ** 1.5),
    "floor 0.12, exponential, exponent 1": lambda samples: 0.12 + 0.6 * math.exp(-samples / 300),
    "floor 0.05, exponential, exponent 0.5": lambda samples: 0.05 + 0.9 * math.exp(-((samples / 300) ** 0.5)),
    "a line over the logarithm": lambda samples: 0.75 - 0.1 * math.log2(samples / 100),
    "steps end it": lambda samples: 0.12 + 0.5 * (samples / 100) ** -0.8 + 0.1 * samples / SAMPLES,
}


def curve(bench: Bench) -> None:
    trials, chance = 4 if bench.quick else 40, np.random.default_rng(0)
    for name, law in LAWS.items():
        for starts in (1, 3):
            bench.at(f"{name}, {starts} starts", 0.0)
            inside, far = np.mean([trial(chance, law, starts) for _ in range(trials)], axis=0)
            data = f"{name}, {starts} starts with {100 * SPREAD:.0f} point of spread, {QUESTIONS} questions"
            bench.report.figure("hidden largest share inside 80 %", data, "share", Side("curve", [float(inside)]))
            bench.report.figure("truth at 4 times the samples inside 80 %", data, "share", Side("curve", [float(far)]))


def trial(chance: np.random.Generator, law: Callable[[float], float], starts: int) -> tuple[bool, bool]:
    """Whether intervals hold the measured largest share, hidden, and the true score at four times the samples."""
    points = simulated(chance, law, starts)
    known = points.some(range(len(SHARES) - 1))
    largest = hidden(known, float(SAMPLES), starts=starts).score
    far = predicted(fitted_laws(points), points, 4.0 * SAMPLES, starts=10**9).score
    is_hidden_inside = largest.low <= points.means[-1] <= (largest.high or 1.0)
    return bool(is_hidden_inside), far.low <= 1 - law(4 * SAMPLES) <= (far.high or 1.0)


def simulated(chance: np.random.Generator, law: Callable[[float], float], starts: int) -> Points:
    """Answers to the same questions, most of which are hard or easy for all trainings."""
    hard, trainings = chance.random(QUESTIONS), dict[str, list[Training]]()
    for share in SHARES:
        for start in range(starts):
            rate = np.clip(law(SAMPLES * share) + chance.normal(0, SPREAD), 0, 1)
            wrong = np.where(chance.random(QUESTIONS) < 0.3, chance.random(QUESTIONS) < rate, hard < rate)
            scores: dict[Any, float] = {
                (f"s{place}", 0, "q", "a"): float(not is_wrong) for place, is_wrong in enumerate(wrong)
            }
            trainings.setdefault(str(share), []).append(Training(str(share), start, "", scores=scores))
    return points_of(trainings, {str(share): SAMPLES * share for share in SHARES})
