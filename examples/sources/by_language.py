"""Records of a LLaVA file with their language as the slice, so that the evaluation has a row for each language.

In the run file:

    data:
      source: examples/sources/by_language.py:records
      source_arguments: {path: data/all.json, only: "English, German"}
      image_folder: data/images

A language is told by the script of the text and, in Latin script, by frequent words: add those of yours.
"""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

SCRIPTS = {
    "HANGUL": "Korean", "GREEK": "Greek", "HEBREW": "Hebrew", "THAI": "Thai", "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese", "CJK": "Chinese",
}  # fmt: skip
WORDS = {
    "English": "the is are what this of and how many does",
    "German": "der die das ist was sind wie viele und auf",
    "French": "le les est quelle que sont combien dans et une",
    "Spanish": "el los es qué que son cuántos en y una",
}


def records(path, only=""):
    """Yield the records of a JSON array, each with its language as `slice`; `only`: names of languages to keep."""
    kept = {name.strip() for name in only.split(",") if name.strip()}
    for record in json.loads(Path(path).read_text(encoding="utf-8")):
        language = language_of(" ".join(turn["value"] for turn in record["conversations"]).replace("<image>", ""))
        if not kept or language in kept:
            yield record | {"slice": language}


def language_of(text):
    """Return such as "German"; the name of the script where words do not tell."""
    scripts = Counter(unicodedata.name(letter, "UNKNOWN").split()[0] for letter in text if letter.isalpha())
    if not scripts:
        return "no letters"
    if scripts["HIRAGANA"] or scripts["KATAKANA"]:
        return "Japanese"  # which has Chinese characters too
    script = scripts.most_common(1)[0][0]
    words = set(re.findall(r"\w+", text.lower()))
    best, second = Counter({name: len(words & set(known.split())) for name, known in WORDS.items()}).most_common(2)
    if script == "LATIN" and best[1] > second[1]:
        return best[0]
    return SCRIPTS.get(script, f"{script.capitalize()} script")
