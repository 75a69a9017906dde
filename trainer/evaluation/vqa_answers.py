"""Answers as the VQA evaluation compares them: normalised, and against ten people's answers.

Source: Antol et al. 2015, arXiv 1505.00468, section 3; the rules of visualqa.org/evaluation and of its program, whose
list of contractions is kept, quirks included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

ENOUGH = 3  # people who gave an answer, from which it is right
ARTICLES = {"a", "an", "the"}
NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_POINT = re.compile(r"\.(?!\d)")  # not that of 2.5
_THOUSANDS = re.compile(r"\d,\d")
# Ends of contractions, and the words in front of them.
_CONTRACTED = {
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were wo would",
    "'ve": "could might must not should they we what where who would you",
    "'d": "he how it someone something there they where who you",
    "'s": "he how somebody someone that there what when where who why",
    "'ll": "how it somebody someone something they what who why you",
    "'re": "there they what why you",
    "n't've": "could had might should would",
    "'d've": "he it she somebody someone something there they we who you y'all",
    "'all": "y",
    "'all'll": "y",
    "'am": "ma",
    "'clock": "o",
}
_WHOLE = ("'twas", "'ow's'at")


def _contractions() -> dict[str, str]:
    """Contractions without one of their apostrophes -> with all of them."""
    forms = [f"{word}{end}" for end, words in _CONTRACTED.items() for word in words.split()]
    contractions = {
        form[:place] + form[place + 1 :]: form
        for form in (*forms, *_WHOLE)
        for place, letter in enumerate(form)
        if letter == "'"
    }
    return contractions | {"somebody'd": "somebodyd"}  # as in the program


CONTRACTIONS = _contractions()


@lru_cache(1 << 16)
def normalise_answer(text: str) -> str:
    """Lower case, without articles and most punctuation, number words as digits, contractions with their apostrophe.

    A mark beside a space is left out, another one becomes a space; all are left out where the text has a number such
    as 1,000.
    """
    text = text.replace("\n", " ").replace("\t", " ").strip()
    has_thousands, plain = _THOUSANDS.search(text), text
    for mark in PUNCTUATION:
        if mark in text:
            is_beside_space = f"{mark} " in text or f" {mark}" in text
            plain = plain.replace(mark, "" if is_beside_space or has_thousands else " ")
    words = (NUMBERS.get(word, word) for word in _POINT.sub("", plain).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def consensus(answers: Sequence[str], prediction: str) -> float:
    """VQA accuracy, 0 to 1: min(1, people who gave this answer / 3), averaged over leaving out each person in turn.

    Both sides are normalised, as the rules say. The program does not normalise where all answers are equal letter by
    letter, and then calls `Yes` wrong for ten times `yes`.
    """
    normalised = normalise_answer(prediction)
    matches = [normalise_answer(answer) == normalised for answer in answers]
    count = sum(matches)
    return sum(min(1.0, (count - match) / ENOUGH) for match in matches) / len(matches)
