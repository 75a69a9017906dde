"""Intervals and tests over two sources of chance: the random starts of a training and the questions it was asked.

The variance of a variant's mean is that of drawing questions, by the bootstrap over images, the same draws for all
variants; and that of starts beyond it: the means of starts vary by their answers to the same questions too, which the
draws have already. Student's degrees of freedom are Satterthwaite's (1946, An approximate distribution of estimates of
variance components, Biometrics Bulletin 2): where questions decide, few starts cost little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlmpipe.records.sweep_comparison import Measured
from vlmpipe.trainer.evaluation.significance.bootstrap import SEED, Float64Array, unbiased
from vlmpipe.trainer.evaluation.significance.paired import student_cdf, student_quantile

RESAMPLES = 10_000
LEVEL = 0.05  # of a test, after correction
POWER = 0.8  # how often a difference that "could have been seen" is shown


@dataclass(frozen=True)
class VariantScores:
    """A variant's mean score, and what it would vary by.

    draws: (RESAMPLES,) the mean if other questions were drawn.
    starts_variance: of the mean, by starts beyond what questions explain.
    starts_error: of the mean, by all that starts differ in; its squared share sets the degrees of freedom.
    """

    mean: float
    draws: Float64Array
    starts: int
    starts_variance: float
    starts_error: float


@dataclass(frozen=True)
class Resampled:
    """Mean scores of variants that were asked the same questions.

    groups: of questions that are drawn together. One tells nothing of others: intervals of shares are all that a share
        can be, those of other scores hold the chance of starts alone.
    is_share: every score lies from 0 to 1, as an accuracy does.
    """

    variants: dict[str, VariantScores]
    groups: int
    is_share: bool

    @property
    def means(self) -> dict[str, float]:
        return {name: resampled.mean for name, resampled in self.variants.items()}

    @property
    def knows_nothing(self) -> bool:
        return self.groups < 2 and self.is_share

    def score(self, variant: str) -> Measured:
        resampled = self.variants[variant]
        if self.knows_nothing:
            return Measured(value=resampled.mean, interval=(0.0, 1.0))
        error, freedom = self._error(resampled.draws, [resampled])
        half = student_quantile(1 - LEVEL / 2, freedom) * error
        low, high = resampled.mean - half, resampled.mean + half
        return Measured(
            value=resampled.mean, interval=(max(0.0, low), min(1.0, high)) if self.is_share else (low, high)
        )

    def difference(self, variant: str, other: str) -> Measured:
        """Return the mean difference between `variant` and `other`, with its confidence interval."""
        value, error, freedom = self._compared(variant, other)
        if self.knows_nothing:
            return Measured(value=value, interval=(-1.0, 1.0))
        quantile = student_quantile(1 - LEVEL / 2, freedom)
        half, could_see = quantile * error, (quantile + student_quantile(POWER, freedom)) * error
        return Measured(value=value, interval=(value - half, value + half), could_see=could_see)

    def p_two_sided(self, variant: str, other: str) -> float:
        """How often a difference this large or larger arises without one."""
        value, error, freedom = self._compared(variant, other)
        return 2 * (1 - _cdf(abs(value), error, freedom))

    def p_better(self, variant: str, other: str, margin: float = 0.0) -> float:
        """Return the p value of the claim that `variant` is better than `other`, or worse by less than `margin`."""
        value, error, freedom = self._compared(variant, other)
        return 1 - _cdf(value + margin, error, freedom)

    def _compared(self, variant: str, other: str) -> tuple[float, float, int]:
        """Difference of the means, its standard error, and degrees of freedom."""
        first, two = self.variants[variant], self.variants[other]
        return first.mean - two.mean, *self._error(first.draws - two.draws, [first, two])

    def _error(self, draws: Float64Array, variants: Sequence[VariantScores]) -> tuple[float, int]:
        """Standard error, and Satterthwaite's degrees of freedom, rounded down."""
        of_questions = float(draws.var()) * unbiased(self.groups) ** 2 if self.groups > 1 else 0.0
        variance = of_questions + sum(variant.starts_variance for variant in variants)
        spent = sum(variant.starts_error**2 / (variant.starts - 1) for variant in variants if variant.starts > 1)
        spent += of_questions**2 / max(1, self.groups - 1)
        return math.sqrt(variance), max(1, min(10_000, int(variance**2 / spent))) if spent else 10_000


def _cdf(value: float, error: float, freedom: int) -> float:
    """Return Student's cumulative distribution at `value / error`; a step function where `error` is 0."""
    if error == 0:
        return 0.5 if value == 0 else float(value > 0)
    ratio = value / error
    return student_cdf(ratio, freedom) if ratio >= 0 else 1 - student_cdf(-ratio, freedom)


def resample(
    scores: Mapping[str, Sequence[Sequence[float]]], groups: Sequence[str], resamples: int = RESAMPLES
) -> Resampled:
    """Resample the scores of variants on the same questions.

    Args:
        scores: by variant, (starts, questions).
        groups: of each question, the images that it is about: their questions are drawn together.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of_question = np.array([numbers[group] for group in groups])
    generator = np.random.default_rng(SEED)
    count = len(numbers)
    times = generator.multinomial(count, np.full(count, 1 / count), resamples).astype(np.float64)
    questions = times @ np.bincount(of_question, minlength=count)
    variants = {}
    for variant, of_starts in scores.items():
        values = np.asarray(of_starts, np.float64)
        starts = len(values)
        sums = np.zeros((starts, count))
        for start in range(starts):
            np.add.at(sums[start], of_question, values[start])
        by_start = (times @ sums.T) / questions[:, None]
        draws = by_start.mean(1)
        between = explained = 0.0
        if starts > 1:
            between = float(values.mean(1).var(ddof=1))
            # Variance of a start's mean by its own answers to drawn questions, apart from what starts share.
            explained = float((by_start - draws[:, None]).var(0).mean()) * starts / (starts - 1)
        variants[variant] = VariantScores(
            float(values.mean()), draws, starts, max(0.0, between - explained) / starts, between / starts
        )
    every = np.concatenate([np.ravel(np.asarray(of_starts, np.float64)) for of_starts in scores.values()])
    return Resampled(variants, count, is_share=bool(((every >= 0) & (every <= 1)).all()))


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
