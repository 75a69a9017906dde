"""Rules VP70x on secrets, and the search for them. No function here gives back a secret, or part of one."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

from trainer.redaction import known_form
from vlmpipe.job_spec.rules.base import Breach, Job, read_yaml

LEAST_BITS_PER_CHARACTER = 4.0  # 32 random letters and digits have about 4.6
LEAST_CHANGES = 0.4  # share of neighbours of another class; about 0.64 in random text, mostly below 0.4 in names
MOST_IN_WORDS = 0.2  # share of letters in runs of four small ones; about 0.09 in random text
MOST_SEPARATORS = 0.12  # share of - and _; 0.03 in random text
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_REFERENCE = re.compile(
    r"\$.*|[<\[{].*|projects/[^/]+/secrets/.*|(gs|s3|https?|file|sm)://.*|[./~].*|.*\.(json|txt|pem|key|ya?ml)",
    re.DOTALL,
)
_SWITCH = re.compile(r"true|false|yes|no|on|off|none|null|0|1", re.IGNORECASE)
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_ASSIGNMENT = re.compile(r"(?:^|[\s;&'\"])-{0,2}([A-Za-z][\w-]*)[=](\"[^\"]*\"|'[^']*'|[^\s;&]*)")
FIX = "read it from Secret Manager in the program, as the job's service account; the spec is visible to many"


@functools.cache
def _names() -> re.Pattern[str]:
    return re.compile(read_yaml("secrets.yaml")["names"])


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds a secret, such as WANDB_API_KEY or --hf-token."""
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).replace("-", "_").upper()
    return bool(_names().search(snake))


def may_be_secret(name: str, value: str) -> bool:
    """Whether the value under a secret's name is one, and not a reference, a file, a switch or a special token."""
    value = value.strip("\"' ")
    if not value or _REFERENCE.fullmatch(value) or _SWITCH.fullmatch(value):
        return False
    return not (value.isdigit() and name.upper().endswith("TOKEN"))  # the id of a token in a vocabulary


def form_of_secret(value: str) -> str:
    """What kind of secret the value looks like; empty if it does not."""
    if form := known_form(value):
        return form
    return "random text" if _TOKEN.fullmatch(value) and _is_random(value) else ""


def _is_random(text: str) -> bool:
    """Letters of both cases and digits without order. Digests and UUIDs have one case: they are no secrets."""
    classes = ["U" if c.isupper() else "L" if c.islower() else "D" if c.isdigit() else "" for c in text]
    if not {"U", "L", "D"} <= set(classes) or text.startswith("/"):
        return False
    in_words = sum(map(len, re.findall("[a-z]{4,}", text)))
    separators = len(re.findall("[-_]", text))
    if in_words > MOST_IN_WORDS * len(text) or separators > MOST_SEPARATORS * len(text):
        return False
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
    changes = sum(a != b for a, b in itertools.pairwise(classes)) / (len(text) - 1)
    return bits >= LEAST_BITS_PER_CHARACTER and changes >= LEAST_CHANGES


def check(job: Job) -> Iterator[Breach]:
    """Secrets in environment, command and arguments."""
    for pool in job.pools:
        for path, name, value in pool.environment():
            if is_secret_name(name) and may_be_secret(name, value):
                yield Breach("VP701", path, f"{name} with a value of {len(value)} characters", "no secrets", FIX)
            elif form := form_of_secret(value):
                found = f"{name} with {form} of {len(value)} characters"
                yield Breach("VP702", path, found, "no secrets", FIX)
        for path, task in pool.tasks():
            for field in ("command", "args"):
                for index, found in _in_words(task.get(field) or []):
                    yield Breach("VP703", (*path, field, index), found, "no secrets", FIX)


def _in_words(words: list[str]) -> Iterator[tuple[int, str]]:
    """Index of the word, and what is there; one finding a word."""
    for index, word in enumerate(words):
        option = _OPTION.fullmatch(words[index - 1]) if index else None
        named = [
            name for name, value in _ASSIGNMENT.findall(word) if is_secret_name(name) and may_be_secret(name, value)
        ]
        if named:
            yield index, f"{named[0]} with a value"
        elif option and is_secret_name(option[1]) and not word.startswith("-") and may_be_secret(option[1], word):
            yield index, f"a value for --{option[1]}"
        elif form := form_of_secret(word) or form_of_secret(word.partition("=")[2]):
            yield index, f"{form} of {len(word)} characters"
