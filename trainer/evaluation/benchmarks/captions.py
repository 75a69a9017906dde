"""BLEU-4 and ROUGE-L of captions, given as words.

Sources: Papineni et al. 2002 (BLEU: clipped counts over the whole set, the closest reference's length); Lin 2004
(ROUGE-L), with the beta and the best reference of the COCO caption evaluation, Chen et al. 2015, arXiv 1504.00325.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vlmpipe.trainer.evaluation.significance.bootstrap import Float64Array

LONGEST_GRAM = 4
BETA = 1.2
TINY, SMALL = 1e-15, 1e-9
BLEU_COLUMNS = 2 * LONGEST_GRAM + 2

Words = Sequence[str]


def bleu_tally(references: Sequence[Words], caption: Words) -> tuple[float, ...]:
    """Return a caption's BLEU counts: matched n-grams, then all n-grams, for n from 1 to 4; the caption's length, then
    the closest reference's.

    An n-gram counts at most as often as in the reference that has it most often. Of two references equally close the
    shorter one counts.
    """
    matched, whole = [], []
    for length in range(1, LONGEST_GRAM + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= _grams(reference, length)
        grams = _grams(caption, length)
        matched.append(sum((grams & most).values()))
        whole.append(sum(grams.values()))
    closest = min((abs(len(reference) - len(caption)), len(reference)) for reference in references)[1]
    return (*matched, *whole, len(caption), closest)


def bleu(sums: Float64Array) -> Float64Array:
    """BLEU-4, 0 to 1, from sums of tallies (..., BLEU_COLUMNS), with the constants of pycocoevalcap, the program of
    COCO's authors: a set of which no four words agree has a score near 0.
    """
    matched, whole = sums[..., :LONGEST_GRAM], sums[..., LONGEST_GRAM : 2 * LONGEST_GRAM]
    ratio = (sums[..., -2] + TINY) / (sums[..., -1] + SMALL)
    precision = ((matched + TINY) / (whole + SMALL)).prod(axis=-1) ** (1 / LONGEST_GRAM)
    return precision * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1.0)), 1.0)


def rouge_l(references: Sequence[Words], caption: Words) -> float:
    """F of the longest common subsequence, 0 to 1: the best precision and the best recall over the references."""
    common = [_longest_common(reference, caption) for reference in references]
    precision = max(common) / len(caption) if caption else 0.0
    recall = max(
        length / len(reference) if reference else 0.0 for length, reference in zip(common, references, strict=True)
    )
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _longest_common(first: Words, other: Words) -> int:
    before = [0] * (len(other) + 1)
    for word in first:
        row = [0]
        for place, theirs in enumerate(other):
            row.append(before[place] + 1 if word == theirs else max(before[place + 1], row[place]))
        before = row
    return before[-1]


def _grams(words: Words, length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))
