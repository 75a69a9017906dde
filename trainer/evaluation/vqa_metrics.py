"""VQA accuracy and ANLS: how close an answer is to the expected one."""

from __future__ import annotations

import re

import numpy as np

LEAST_SIMILARITY = 0.5  # a reading with less of it counts as no reading
ARTICLES = {"a", "an", "the"}
NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
_IN_NUMBER = re.compile(r"(?<=\d)[,:](?=\d)")  # 1,000 and 10:30
_POINT = re.compile(r"(?<!\d)\.|\.(?!\d)")  # not that of 2.5
_MARKS = re.compile(r"[^\w\s.]|_")


def vqa_accuracy(answer: str, prediction: str) -> float:
    """1 where both are the same after the normalisation of the VQA evaluation: case, punctuation, articles, apostrophes
    and how a number is written do not matter.

    Source: Antol et al. 2015, arXiv 1505.00468, with the rules of visualqa.org/evaluation. Of the ten answers that it
    takes a vote of, there is one here.
    """
    return float(_normalised(answer) == _normalised(prediction))


def anls(answer: str, prediction: str) -> float:
    """Normalised Levenshtein similarity, 0 below one half: how well text was read, forgiving single letters.

    Source: Biten et al. 2019, arXiv 1905.13648, equation 1. Case and white space do not matter.
    """
    expected, read = (" ".join(text.lower().split()) for text in (answer, prediction))
    longest = max(len(expected), len(read))
    similarity = 1 - levenshtein(expected, read) / longest if longest else 1.0
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def levenshtein(one: str, other: str) -> int:
    """Fewest insertions, deletions and replacements of characters that make one text the other."""
    letters, places = np.array([ord(letter) for letter in other], np.int64), np.arange(len(other) + 1)
    before = places  # from nothing to each beginning of `other`
    for row, letter in enumerate(one, start=1):
        now = np.append(row, np.minimum(before[1:] + 1, before[:-1] + (letters != ord(letter))))
        before = np.minimum.accumulate(now - places) + places  # or one letter more than the place to the left
    return int(before[-1])


def _normalised(text: str) -> list[str]:
    plain = _IN_NUMBER.sub("", text.lower().replace("'", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", ""))
    words = _MARKS.sub(" ", _POINT.sub("", plain)).split()
    return [NUMBERS.get(word, word) for word in words if word not in ARTICLES]
