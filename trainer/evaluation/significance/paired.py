"""A test of two models' answers to the same questions: is one worse than the other by less than a margin?

Tango's score statistic for a difference of paired shares, which holds its level where few answers differ, also none.
Questions about one image are not independent: counts are divided by the design effect of images, and the normal
quantile becomes Student's with one degree of freedom less than there are images.

Sources: Tango 1998, Equivalence test and confidence interval for the difference in proportions for the paired-sample
design, Statistics in Medicine 17, equations 5 to 8; Rao and Scott 1992, A simple method for the analysis of clustered
binary data, Biometrics 48 (counts divided by the design effect); Abramowitz and Stegun 1964, Handbook of mathematical
functions, 26.7.3 and 26.7.4 (Student's t).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from statistics import NormalDist

from pydantic import Field

from vlmpipe.trainer.config.base import Section

LEVEL = 0.05  # one-sided: how often a model that is worse by the whole margin may pass
POWER = 0.8  # how often a model that is as good passes by the default margin
DIFFERING = 0.1  # share of answers in which two equal models are taken to differ
MAX_DEFAULT_MARGIN = 0.1
MIN_DISAGREEMENTS = 10  # with fewer, how they gather on images cannot be estimated
_NORMAL_FROM = 400  # degrees of freedom from which Student's quantile is the normal one, within 0.3 %


class PairedCounts(Section):
    """Two answers, of `model` and `other`, to each of the same questions."""

    questions: int = Field(ge=0)
    only_model: int = Field(ge=0, description="Questions that only the model answered right.")
    only_other: int = Field(ge=0, description="Questions that only the other answered right.")
    images: int = Field(ge=0, description="Images, or sets of images, that the questions are about.")
    design_effect: float = Field(
        1.0, ge=1, allow_inf_nan=False, description="Variance of the difference over that of independent questions."
    )

    @property
    def difference(self) -> float:
        """Share of right answers of the model less the other's; 0 without questions."""
        return (self.only_model - self.only_other) / self.questions if self.questions else 0.0


def paired_counts(groups: Sequence[Hashable], model: Sequence[bool], other: Sequence[bool]) -> PairedCounts:
    """Count what both answered right or wrong.

    Args:
        groups: of each question, the image or images that it is about.
        model: whether the model answered each question right.
        other: the same for the model or rule that it is compared with.
    """
    of_group: dict[Hashable, list[int]] = defaultdict(list)
    for group, ours, its in zip(groups, model, other, strict=True):
        of_group[group].append(int(ours) - int(its))
    differences = [list(values) for values in of_group.values()]
    flat = [value for values in differences for value in values]
    return PairedCounts(
        questions=len(flat),
        only_model=flat.count(1),
        only_other=flat.count(-1),
        images=len(differences),
        design_effect=_design_effect(differences),
    )


def _design_effect(differences: Sequence[Sequence[int]]) -> float:
    """Variance of the mean difference from sums by image, over that of independent questions, at least 1.

    With few disagreements it is that of images whose questions all go the same way.
    """
    count, images = sum(map(len, differences)), len(differences)
    if images == count:
        return 1.0
    worst = sum(len(values) ** 2 for values in differences) / count
    flat = [value for values in differences for value in values]
    if images < 2 or sum(map(abs, flat)) < MIN_DISAGREEMENTS:
        return worst
    mean = sum(flat) / count
    independent = sum((value - mean) ** 2 for value in flat)
    by_image = sum((sum(values) - mean * len(values)) ** 2 for values in differences)
    if not independent:  # all questions differ the same way
        return worst
    return max(1.0, by_image * images / (images - 1) / independent)


def score_statistic(counts: PairedCounts, difference: float) -> float:
    """Tango's statistic of the hypothesis that the true difference is `difference`: large where it is larger."""
    scale = 1 / counts.design_effect
    n, more, less = (scale * value for value in (counts.questions, counts.only_model, counts.only_other))
    if not n:
        return 0.0
    a, b, c = 2 * n, (2 * n - more + less) * difference - more - less, -less * difference * (1 - difference)
    share = max((math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a), 0.0, -difference)
    variance = n * (2 * share + difference * (1 - difference))
    distance = more - less - n * difference
    if variance <= 0:
        return 0.0 if abs(distance) < 1e-12 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def interval(counts: PairedCounts, level: float = LEVEL) -> tuple[float, float]:
    """Differences that the answers do not contradict; each end is wrong in a share `level` of cases."""
    bound = critical_value(counts.images, level)
    return _root(counts, bound), _root(counts, -bound)


def is_above(counts: PairedCounts, difference: float, level: float = LEVEL) -> bool:
    """Return whether the answers show that the true difference is larger than `difference`."""
    if not -1 < difference < 1 or not counts.questions:
        return difference <= -1 and bool(counts.questions)
    return score_statistic(counts, difference) > critical_value(counts.images, level)


def default_margin(questions: int) -> float:
    """Return the smallest drop that this number of questions can detect.

    A model that is worse by it passes in a share LEVEL of cases, one that is as good in a share POWER, if a share
    DIFFERING of their answers differ.

    The normal approximation of the test's power; at most MAX_DEFAULT_MARGIN.
    """
    deviations = NormalDist().inv_cdf(1 - LEVEL) + NormalDist().inv_cdf(POWER)
    return min(MAX_DEFAULT_MARGIN, deviations * math.sqrt(DIFFERING / max(questions, 1)))


def critical_value(images: int, level: float = LEVEL) -> float:
    """Critical value of the statistic; infinite for fewer than two images."""
    return student_quantile(1 - level, images - 1) if images > 1 else math.inf


def share_interval(groups: Sequence[Hashable], right: Sequence[bool], level: float = LEVEL / 2) -> tuple[float, float]:
    """Between which the true share of right answers lies; each end is wrong in a share `level` of cases."""
    of_group: dict[Hashable, list[int]] = defaultdict(list)
    for group, is_right in zip(groups, right, strict=True):
        of_group[group].append(int(is_right))
    count = len(right) / _design_effect(list(of_group.values()))
    return wilson(sum(right) / len(right), count, len(of_group), level)


def wilson(share: float, questions: float, images: int, level: float = LEVEL / 2) -> tuple[float, float]:
    """Wilson's score interval of a share (1927), with Student's quantile. questions: over the design effect."""
    z = critical_value(images, level)
    if math.isinf(z):
        return 0.0, 1.0
    middle = (share + z * z / (2 * questions)) / (1 + z * z / questions)
    half = z * math.sqrt(share * (1 - share) / questions + z * z / (4 * questions**2)) / (1 + z * z / questions)
    return max(0.0, middle - half), min(1.0, middle + half)


def _root(counts: PairedCounts, value: float) -> float:
    """The difference at which the statistic, which falls with it, has this value."""
    low, high = -1.0, 1.0
    if not counts.questions or math.isinf(value):
        return math.copysign(1.0, -value)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if score_statistic(counts, middle) > value else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=4096)
def student_quantile(share: float, freedom: int) -> float:
    """The value below which Student's t with `freedom` degrees of freedom lies in a share of cases, 0.5 or more."""
    if freedom >= _NORMAL_FROM:
        return NormalDist().inv_cdf(share)
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def student_cdf(value: float, freedom: int) -> float:
    """How often Student's t is below a value of 0 or more."""
    if freedom >= _NORMAL_FROM:
        return NormalDist().cdf(value)
    angle = math.atan2(value, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 1.0)
    if is_odd and freedom > 1:
        total = cosine
    for k in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + inside / 2
