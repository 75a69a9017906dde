"""CIDEr-D caption metric.

Source: Vedantam, Zitnick and Parikh 2015, arXiv 1411.5726, equations 1 to 3 and the section on CIDEr-D, with its sigma
of 6, n-grams of 1 to 4 words, clipped counts and the factor of 10. As in the authors' program, term frequencies are
plain counts, and an n-gram without a reference counts as if one image had it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LONGEST_GRAM = 4
SIGMA = 6.0  # words of difference in length
SCALE = 10.0
CAPTION_WORDS = 5.0  # average length from which references look like captions
MIN_IMAGES = 2  # document frequencies of a single image are meaningless

Gram = tuple[str, ...]
_CLITIC = re.compile(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))(?!\w)")
_TOKEN = re.compile(r"n't|'\w+|\w+(?:[-./,:]\w+)*")


@dataclass(frozen=True)
class Captioned:
    """An image's expected captions, one or more, and the model's."""

    references: tuple[str, ...]
    caption: str


def tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation around them; `don't` is `do`, `n't` and `dog's` is `dog`, `'s`.

    Close to the Penn Treebank tokenizer that CIDEr's authors use, except that abbreviations lose their last full stop.
    In a language without spaces a run of letters is one word.
    """
    plain = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return _TOKEN.findall(_CLITIC.sub(r" \1", plain))


def looks_like_captions(references: Sequence[str]) -> bool:
    """Return whether the expected answers have CAPTION_WORDS words or more on average."""
    return bool(references) and fmean(len(tokens(text)) for text in references) >= CAPTION_WORDS


def cider_d(captioned: Sequence[Captioned]) -> list[float]:
    """CIDEr-D of each image's caption, from 0 to 10.

    Document frequencies come from the references of `captioned`: scores of different sets are not comparable, and all
    are 0 for a single image.
    """
    return cider_d_of_tokens(
        [([tokens(text) for text in image.references], tokens(image.caption)) for image in captioned]
    )


def cider_d_of_tokens(captioned: Sequence[tuple[Sequence[list[str]], list[str]]]) -> list[float]:
    """CIDEr-D of (references, caption) given as words."""
    references = [[_grams(words) for words in texts] for texts, _ in captioned]
    known_by = Counter(gram for texts in references for gram in {gram for grams in texts for gram in grams})
    rarity = {gram: math.log(len(captioned) / count) for gram, count in known_by.items()}
    rarest = math.log(len(captioned)) if captioned else 0.0

    def weighed(grams: Counter[Gram]) -> list[dict[Gram, float]]:
        vectors: list[dict[Gram, float]] = [{} for _ in range(LONGEST_GRAM)]
        for gram, count in grams.items():
            vectors[len(gram) - 1][gram] = count * rarity.get(gram, rarest)
        return vectors

    scores = []
    for (texts, words), counted in zip(captioned, references, strict=True):
        weights = weighed(_grams(words))
        against = [
            math.exp(-((len(words) - len(text)) ** 2) / (2 * SIGMA**2)) * _similarity(weights, weighed(grams))
            for text, grams in zip(texts, counted, strict=True)
        ]
        scores.append(SCALE * fmean(against))
    return scores


def _similarity(first: list[dict[Gram, float]], theirs: list[dict[Gram, float]]) -> float:
    """Mean cosine over the n-gram lengths, with each count clipped to the reference's."""
    return fmean(
        sum(min(weight, reference.get(gram, 0.0)) * reference.get(gram, 0.0) for gram, weight in caption.items())
        / (norm if (norm := math.hypot(*caption.values()) * math.hypot(*reference.values())) else 1.0)
        for caption, reference in zip(first, theirs, strict=True)
    )


def _grams(words: Sequence[str]) -> Counter[Gram]:
    return Counter(
        tuple(words[start : start + length])
        for length in range(1, LONGEST_GRAM + 1)
        for start in range(len(words) - length + 1)
    )
