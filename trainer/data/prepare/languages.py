"""Guesses the language of a text: by its script, and where several languages share one, by frequent words.

It serves a person who looks over a data set. A few words are too short a text to tell; then only the script is named.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import yaml

WORDS = Path(__file__).with_suffix(".yaml")
LETTERS = 400  # of a text are enough
FEWEST_WORDS = 2.0  # frequent words of a language; a word that two languages have counts half for each
ONE_LANGUAGE = {
    "HANGUL": "Korean", "GREEK": "Greek", "HEBREW": "Hebrew", "THAI": "Thai", "GEORGIAN": "Georgian",
    "ARMENIAN": "Armenian", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "CJK": "Chinese",
}  # fmt: skip
KANA = ("HIRAGANA", "KATAKANA")


def language_of(text: str) -> str:
    """Such as "German"; "Latin script" where the words do not tell; "no letters"."""
    letters = [character for character in text if character.isalpha()][:LETTERS]
    scripts = Counter(map(_script, letters))
    if not scripts:
        return "no letters"
    if any(scripts[kana] for kana in KANA) and scripts.most_common(1)[0][0] in (*KANA, "CJK"):
        return "Japanese"  # which mixes them with Chinese characters
    script = scripts.most_common(1)[0][0]
    if script in ONE_LANGUAGE:
        return ONE_LANGUAGE[script]
    scores: Counter[str] = Counter()
    for word in re.findall(r"[^\W\d_]+", text.lower()):
        for language, weight in _languages_of_words().get(script, {}).get(word, ()):
            scores[language] += weight  # type: ignore[assignment]
    (best, most), *others = [*scores.most_common(2), ("", 0)]
    return best if most >= FEWEST_WORDS and most > others[0][1] else f"{script.capitalize()} script"


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split()[0]


@cache
def _languages_of_words() -> dict[str, dict[str, list[tuple[str, float]]]]:
    """Script -> word -> the languages that have it, with its weight for each."""
    found: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for script, languages in yaml.safe_load(WORDS.read_text(encoding="utf-8")).items():
        having: dict[str, list[str]] = {}
        for language, words in languages.items():
            for word in words.split():
                having.setdefault(word, []).append(language)
        found[script] = {word: [(name, 1 / len(names)) for name in names] for word, names in having.items()}
    return found
