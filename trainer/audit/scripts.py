"""The script that most letters of a text are written in, by its Unicode names."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

NONE = 0
# Han, kana and Hangul are told apart, as their names begin differently.
SCRIPTS = (
    "none", "LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "BENGALI", "TAMIL", "TELUGU", "THAI",
    "HANGUL", "HIRAGANA", "KATAKANA", "CJK", "GEORGIAN", "ARMENIAN", "ETHIOPIC", "other",
)  # fmt: skip
READ_CHARACTERS = 400


@lru_cache(4096)
def _of_letter(character: str) -> int:
    if not character.isalpha():
        return NONE
    first = unicodedata.name(character, "").split(" ")[0]
    return SCRIPTS.index(first) if first in SCRIPTS else len(SCRIPTS) - 1


def script_of(text: str) -> int:
    """Index in SCRIPTS of the script of most letters; NONE without letters."""
    counts = Counter(map(_of_letter, text[:READ_CHARACTERS]))
    counts.pop(NONE, None)
    return counts.most_common(1)[0][0] if counts else NONE


def script_name(script: int) -> str:
    """The script as people call it."""
    return SCRIPTS[script].title() if SCRIPTS[script].isupper() else SCRIPTS[script]
