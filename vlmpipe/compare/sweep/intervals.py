"""Intervals and tests over two sources of chance: the random starts of a training and the questions it was asked.

A resample draws the samples of the evaluation split, the same ones for all variants, and for each variant its starts.
Deviations of starts from their mean are widened first: by sqrt(n / (n - 1)), as n drawn from n vary too little by that
much (Davison and Hinkley 1997, Bootstrap Methods and their Application, section 3.8), and by Student's t over the
normal quantile, as few starts say little about how starts vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.evaluation.bootstrap import SEED, Float64Array, interval

RESAMPLES = 10_000
LEVEL = 0.05  # of a test, after correction
# Quantile 0.975 of Student's t over the normal distribution's, by starts of each of two variants: 2 (n - 1) degrees of
# freedom. Of 11 starts it is 1.064; all from there on take STUDENT_OF_MORE.
STUDENT_OF_MORE = 1.06
STUDENT = {2: 2.195, 3: 1.417, 4: 1.248, 5: 1.177, 6: 1.137, 7: 1.112, 8: 1.094, 9: 1.082, 10: 1.072}


@dataclass(frozen=True)
class Measured:
    """A value with the interval that holds 95 % of its resamples."""

    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Resampled:
    """Mean scores of variants. means: by variant; draws: by variant, (RESAMPLES,).

    `is_share`: every score lies from 0 to 1, as an accuracy does.
    """

    means: dict[str, float]
    draws: dict[str, Float64Array]
    is_share: bool

    def score(self, variant: str) -> Measured:
        """The mean; of few starts, Student's widening leads past what a share can be, where the interval ends."""
        low, high = interval(self.draws[variant])
        return Measured(self.means[variant], (max(0.0, low), min(1.0, high)) if self.is_share else (low, high))

    def difference(self, variant: str, other: str) -> Measured:
        """Of the first from the second."""
        return Measured(self.means[variant] - self.means[other], interval(self.draws[variant] - self.draws[other]))

    def p_two_sided(self, variant: str, other: str) -> float:
        """How often a difference this large or larger arises without one."""
        draws = self.draws[variant] - self.draws[other]
        tails = [(int((draws <= 0).sum()) + 1), (int((draws >= 0).sum()) + 1)]
        return min(1.0, 2 * min(tails) / (len(draws) + 1))

    def p_better(self, variant: str, other: str, margin: float = 0.0) -> float:
        """Of the claim that the first is better than the second, or worse by less than `margin`."""
        draws = self.draws[variant] - self.draws[other]
        return (int((draws <= -margin).sum()) + 1) / (len(draws) + 1)


def resample(scores: Mapping[str, Sequence[Sequence[float]]], groups: Sequence[str]) -> Resampled:
    """Resample the scores of variants on the same questions.

    Args:
        scores: by variant, (starts, questions).
        groups: of each question, the sample that it is about: its questions are drawn together.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of_question = np.array([numbers[group] for group in groups])
    chance = np.random.default_rng(SEED)
    count = len(numbers)
    times = chance.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)
    questions = times @ np.bincount(of_question, minlength=count)
    means, draws = dict[str, float](), dict[str, Float64Array]()
    for variant, of_starts in scores.items():
        values = np.asarray(of_starts, np.float64)
        starts = len(values)
        sums = np.zeros((starts, count))
        for start in range(starts):
            np.add.at(sums[start], of_question, values[start])
        by_start = (times @ sums.T) / questions[:, None]
        centre = by_start.mean(1, keepdims=True)
        if starts > 1:
            wider = np.sqrt(starts / (starts - 1)) * STUDENT.get(starts, STUDENT_OF_MORE)
            by_start = centre + (by_start - centre) * wider
        drawn = chance.multinomial(starts, np.full(starts, 1 / starts), RESAMPLES) / starts
        means[variant], draws[variant] = float(values.mean()), (by_start * drawn).sum(1)
    every = np.concatenate([np.ravel(np.asarray(of_starts, np.float64)) for of_starts in scores.values()])
    return Resampled(means, draws, is_share=bool(((every >= 0) & (every <= 1)).all()))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p values of several tests, corrected for their number (Holm 1979, A simple sequentially rejective multiple
    test procedure)."""
    corrected, least = dict[str, float](), 0.0
    ordered = sorted(p_values.items(), key=lambda one: one[1])
    for place, (name, value) in enumerate(ordered):
        least = max(least, min(1.0, (len(ordered) - place) * value))
        corrected[name] = least
    return {name: corrected[name] for name in p_values}


def pareto(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """The names whose cost and score (cost, score) no other has at most and at least, and one of both better."""
    return {
        name
        for name, (cost, score) in points.items()
        if not any(
            other_cost <= cost and other_score >= score and (other_cost, other_score) != (cost, score)
            for other_cost, other_score in points.values()
        )
    }
