"""A test of whether questions of a slice are answered right more or less often than all others, by image.

The difference of the two shares over its standard error under the hypothesis that there is none, from sums by image
(Liang and Zeger 1986, Longitudinal data analysis using generalized linear models, Biometrika 73), against Student's t
with one degree of freedom less than the smaller part has images.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, score_statistic, student_cdf

Key = TypeVar("Key", bound=Hashable)


def p_of_slice(groups: Sequence[Hashable], right: Sequence[bool], is_in: Sequence[bool]) -> float | None:
    """Two-sided p value of the difference; None where the slice or the rest is about fewer than MIN_GROUPS images.

    groups: of each question, the image or images that it is about.
    """
    inside = sum(is_in)
    outside = len(is_in) - inside
    images = min(
        len({group for group, inner in zip(groups, is_in, strict=True) if inner}),
        len({group for group, inner in zip(groups, is_in, strict=True) if not inner}),
    )
    if images < MIN_GROUPS:
        return None
    mean = sum(right) / len(right)
    sums: dict[Hashable, float] = defaultdict(float)
    for group, answered, inner in zip(groups, right, is_in, strict=True):
        sums[group] += (answered - mean) / (inside if inner else -outside)
    variance = sum(value * value for value in sums.values()) * len(sums) / (len(sums) - 1)
    if variance <= 0:
        return 1.0
    return _two_sided(sum(sums.values()) / math.sqrt(variance), images - 1)


def p_of_pair(counts: PairedCounts) -> float | None:
    """Two-sided p value of the difference of two models on the same questions; None below MIN_GROUPS images."""
    return None if counts.images < MIN_GROUPS else _two_sided(score_statistic(counts, 0.0), counts.images - 1)


def _two_sided(statistic: float, freedom: int) -> float:
    return 0.0 if math.isinf(statistic) else 2 * (1 - student_cdf(abs(statistic), freedom))


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """The p values of several tests, corrected for their number (Holm 1979, A simple sequentially rejective multiple
    test procedure)."""
    corrected, least = dict[Key, float](), 0.0
    ordered = sorted(p_values.items(), key=lambda test: test[1])
    for place, (name, value) in enumerate(ordered):
        least = max(least, min(1.0, (len(ordered) - place) * value))
        corrected[name] = least
    return {name: corrected[name] for name in p_values}
