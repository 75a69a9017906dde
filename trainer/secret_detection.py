"""Detects secrets by name or value. No function here returns a secret, or part of one."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERNS_FILE = Path(__file__).with_name("secret_patterns.toml")
GITLEAKS_RULES_FILE = Path(__file__).with_name("gitleaks_rules.json")
MIN_BITS_PER_CHARACTER = 4.0  # 32 random letters and digits have about 4.6
MIN_CHANGES = 0.4  # share of neighbours of another class; about 0.64 in random text, mostly below 0.4 in names
MAX_IN_WORDS = 0.2  # share of letters in runs of four small ones; about 0.09 in random text
MAX_SEPARATORS = 0.12  # share of - and _; 0.03 in random text
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
_REFERENCE = re.compile(
    r"\$.*|[<\[{].*|projects/[^/]+/secrets/.*|(gs|s3|https?|file|sm)://.*|[./~].*|.*\.(json|txt|pem|key|ya?ml)",
    re.DOTALL,
)
# The beginning of a URL, up to a user name or password that has not ended; a port is none.
_OPEN_URL = re.compile(r"://[^\s/:]*(?::(?![0-9]{1,5}[/?#]).*)?$")
# name=value, name: value, "name": "value", --name value
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?:--(?P<option>[A-Za-z][\w-]{1,80})[ ]"""
    r"""|(?P<name>-{0,2}[A-Za-z][\w.-]{1,80})["']?\s{0,2}[=:]\s{0,2}["']?)"""
    r"""(?=(?P<value>[^\s"',;&()\[\]{}<>]{1,512}))"""  # ahead: a value may hold the next name
)
_NAME_WORDS = (
    "key",
    "token",
    "secret",
    "passw",
    "passphrase",
    "credential",
    "_pwd",
    "-pwd",
)  # is_secret_name finds no other
_SHORTEST_ASSIGNED = 6
_SWITCH = re.compile(r"true|false|yes|no|on|off|none|null|0|1", re.IGNORECASE)


@functools.cache
def _patterns() -> Mapping[str, Any]:
    return tomllib.loads(PATTERNS_FILE.read_text(encoding="utf-8"))


def is_secret_name(name: str) -> bool:
    """Return whether a variable or option of this name holds a secret, such as WANDB_API_KEY or --hf-token."""
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).replace("-", "_").upper()
    return bool(re.search(_patterns()["names"], snake))


def may_be_secret(name: str, value: str) -> bool:
    """Return whether the value under a secret's name is one, and not a reference, a file, a switch or a special
    token.
    """
    value = value.strip("\"' ")
    if not value or _REFERENCE.fullmatch(value) or _SWITCH.fullmatch(value):
        return False
    return not (value.isdigit() and name.upper().endswith("TOKEN"))  # the id of a token in a vocabulary


def assigned_secrets(text: str) -> Iterator[re.Match[str]]:
    """Where the text gives a secret's name a value, as in WANDB_API_KEY=...; the value is group "value"."""
    lowered = text.lower()
    if any(word in lowered for word in _NAME_WORDS):
        for match in _ASSIGNMENT.finditer(text):
            name = match["option"] or match["name"]
            if is_secret_name(name.lstrip("-")) and _is_assigned(name, match["value"]):
                yield match


def _is_assigned(name: str, value: str) -> bool:
    """Return whether a value is a secret rather than a word of prose or code after a secret's name."""
    if len(value) < _SHORTEST_ASSIGNED or not may_be_secret(name, value):
        return False
    return name.isupper() or name.lower().endswith(("password", "passwd")) or any(map(str.isdigit, value))


def form_of_secret(value: str) -> str:
    """Return the kind of secret that the value looks like; empty if it does not."""
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
    if in_words > MAX_IN_WORDS * len(text) or separators > MAX_SEPARATORS * len(text):
        return False
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
    changes = sum(a != b for a, b in itertools.pairwise(classes)) / (len(text) - 1)
    return bits >= MIN_BITS_PER_CHARACTER and changes >= MIN_CHANGES


@dataclass(frozen=True, eq=False)
class Form:
    """Form of one kind of secret. A text without any of the lower-case keywords has no secret of this form."""

    name: str
    keywords: Sequence[str]
    regex: str

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.regex)


@functools.cache
def forms() -> Sequence[Form]:
    """Well-known kinds of secrets: our own list first, then the rules of gitleaks."""
    rules = json.loads(GITLEAKS_RULES_FILE.read_text(encoding="utf-8"))["rules"]
    return [Form(name, **form) for name, form in {**_patterns()["forms"], **rules}.items()]


@functools.cache
def _forms_by_keyword() -> Sequence[tuple[str, Form]]:
    return [(keyword, form) for form in forms() for keyword in form.keywords]


def possible_forms(text: str) -> Iterable[Form]:
    """The forms that have a keyword in the text."""
    lowered = text.lower()
    return dict.fromkeys(form for keyword, form in _forms_by_keyword() if keyword in lowered)


def known_form(value: str) -> str:
    """Return the well-known kind of secret in the text; empty for none."""
    return next((form.name for form in possible_forms(value) if form.pattern.search(value)), "")


@functools.cache
def _opening() -> re.Pattern[str]:
    """Keywords that hardly occur in ordinary words."""
    keywords = sorted({keyword for keyword, _ in _forms_by_keyword() if not keyword.isalpha() or len(keyword) > 2})
    return re.compile("|".join("(?<![a-z])" * word[0].isalpha() + re.escape(word) for word in keywords if word != "@"))


def may_begin_secret(text: str) -> bool:
    """Return whether the text may end in the middle of a secret of a known form."""
    return bool(_OPEN_URL.search(text) or _opening().search(text.lower()))
