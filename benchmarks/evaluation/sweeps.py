"""Part `sweeps`: how often a sweep's test tells two variants apart, equal ones and one that is five points better."""

from __future__ import annotations

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.comparison.sweep.intervals import LEVEL, resample

QUESTIONS, SHARE, DIFFERING = 500, 0.8, 0.1
EFFECT = 0.05
DRAWS = 400  # of questions: the test takes their variance alone
STARTS, SPREADS = (2, 3, 5), (0.0, 0.01, 0.02)  # trainings of a variant; standard deviation of their true scores


def sweeps(bench: Bench) -> None:
    trials, chance = 20 if bench.quick else 200, np.random.default_rng(0)
    for starts in STARTS:
        for spread in SPREADS:
            bench.at(f"{starts} starts, {100 * spread:.0f} points of spread", 0.0)
            false, found = (
                sum(p_of(chance, starts, spread, effect) < LEVEL for _ in range(trials)) / trials
                for effect in (0.0, EFFECT)
            )
            # 4.5 standard deviations above the level are no chance.
            bench.report.require(
                found_is_level(false, trials), f"{starts} starts: equal variants rarely differ", found=f"{false:.3f}"
            )
            data = f"{starts} starts with {100 * spread:.0f} points of spread, {QUESTIONS} questions"
            bench.report.figure("equal variants told apart", data, "share", Side("sweep", [false]))
            bench.report.figure("variant better by five points found", data, "share", Side("sweep", [found]))


def found_is_level(share: float, trials: int) -> bool:
    return bool(share <= LEVEL + 0.02 + 4.5 * np.sqrt(LEVEL * (1 - LEVEL) / trials))


def p_of(chance: np.random.Generator, starts: int, spread: float, effect: float) -> float:
    """The p value of two variants, the second better by `effect`, on the same questions."""
    easy = chance.random(QUESTIONS)  # a question is easy or hard for all trainings

    def trainings(better: float) -> list[list[float]]:
        found = []
        for _ in range(starts):
            share = SHARE + better + chance.normal(0, spread)
            alike, own = easy < share, chance.random(QUESTIONS) < share
            is_own = chance.random(QUESTIONS) < DIFFERING / 2
            found.append(np.where(is_own, own, alike).astype(float).tolist())
        return found

    scores = {"baseline": trainings(0.0), "other": trainings(effect)}
    return resample(scores, [str(number) for number in range(QUESTIONS)], DRAWS).p_two_sided("other", "baseline")
